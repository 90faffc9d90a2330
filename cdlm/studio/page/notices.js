// What the page tells: errors in a visible box, everything else quietly, for screen readers.

const box = document.getElementById("error");
document.getElementById("error-close").addEventListener("click", hideError);

export function showError(message) {
  document.getElementById("error-text").textContent = message;
  box.hidden = false;
  box.scrollIntoView({ block: "nearest" }); // on a phone one is far below, at the text
  say("");
}

export function hideError() {
  box.hidden = true;
}

export function say(words) {
  document.getElementById("status").textContent = words;
}
