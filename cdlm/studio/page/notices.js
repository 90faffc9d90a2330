// Messages: errors in a visible box, everything else for screen readers.

const box = document.getElementById("error");
document.getElementById("error-close").addEventListener("click", hideError);

export function showError(message) {
  document.getElementById("error-text").textContent = message;
  box.hidden = false;
  box.scrollIntoView({ block: "nearest" }); // on a phone the view is far below, at the sample
  announce("");
}

export function hideError() {
  box.hidden = true;
}

export function announce(message) {
  document.getElementById("status").textContent = message;
}
