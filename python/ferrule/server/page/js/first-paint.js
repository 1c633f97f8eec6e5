// Runs before the page is drawn, so that a dark page does not flash white. Everything else is in modules.
try {
  document.documentElement.dataset.theme = localStorage.getItem("ferrule-theme") ?? "auto";
} catch {
  // A browser that keeps nothing shows what the system has.
}
