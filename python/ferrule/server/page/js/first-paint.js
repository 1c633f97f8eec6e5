// Sets the theme before the first paint, so that a dark page does not flash white; modules run later.
try {
  document.documentElement.dataset.theme = localStorage.getItem("ferrule-theme") ?? "auto";
} catch {
  // Without storage the page follows the system.
}
