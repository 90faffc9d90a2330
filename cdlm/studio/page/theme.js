// Runs before the page is drawn, so that a remembered theme does not flash. Without one, the system decides.
try {
  const theme = localStorage.getItem("theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // Storage may be forbidden: then nothing is remembered.
}
