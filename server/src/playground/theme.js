// The page's theme. A classic script that runs before the body is painted, so that a chosen theme does not flash. It is
// independent of the modules.
"use strict";

const root = document.documentElement;
const THEME_KEY = "tidegate-theme";
const darkSystem = matchMedia("(prefers-color-scheme: dark)");

function remembered(key) {
  try { return localStorage.getItem(key); } catch { return null; } // storage may be forbidden
}

function showTheme() {
  const chosen = remembered(THEME_KEY) ?? root.dataset.theme;
  if (chosen === "light" || chosen === "dark") root.dataset.theme = chosen;
  const shade = root.dataset.theme ?? (darkSystem.matches ? "dark" : "light");
  root.dataset.shade = shade;
  const button = document.getElementById("theme");
  button?.setAttribute("aria-label", `Switch to ${shade === "dark" ? "light" : "dark"} colours`);
}

function toggleTheme() {
  const next = root.dataset.shade === "dark" ? "light" : "dark";
  root.dataset.theme = next;
  try { localStorage.setItem(THEME_KEY, next); } catch { /* lasts for this visit only */ }
  showTheme();
}

showTheme();
darkSystem.addEventListener("change", showTheme);
document.addEventListener("DOMContentLoaded", () => {
  showTheme(); // the button now exists
  document.getElementById("theme").addEventListener("click", toggleTheme);
});
