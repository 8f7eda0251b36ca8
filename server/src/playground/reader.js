// A window over the page that shows a text to read and to copy.

export class Reader {
  constructor() {
    this.dialog = document.getElementById("reader");
    this.title = document.getElementById("reader-title");
    this.text = document.getElementById("reader-text");
    this.copy = document.getElementById("reader-copy");
    this.copy.addEventListener("click", async () => {
      this.copy.textContent = await copied(this.text.textContent) ? "Copied" : "Not allowed by this browser";
    });
  }

  /** `contents` are nodes or texts. */
  open(title, contents, isCode = false) {
    this.title.textContent = title;
    this.text.replaceChildren(...contents);
    this.text.classList.toggle("code", isCode);
    this.copy.textContent = "Copy";
    this.dialog.showModal();
    this.text.scrollTop = isCode ? 0 : this.text.scrollHeight;
  }
}

/** Copies text to the clipboard; returns whether the browser allowed it. It may not, except on HTTPS and localhost. */
export async function copied(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { return false; }
}
