// Runs before the page is drawn, so that a dark page does not flash white. Everything else is in modules.
document.documentElement.dataset.theme = localStorage.getItem("ferrule-theme") ?? "auto";
