"use strict";
// Runs before the page is painted, so that a chosen theme does not flash. Without a choice the system's theme holds.
try {
  const theme = localStorage.getItem("seps-theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch { /* storage is switched off: the system's theme */ }
