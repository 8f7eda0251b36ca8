// A conversation as messages. The sheet below them holds the message that is being written.

const NAMES = { user: "You", assistant: "Model", system: "System", tool: "Tool" };

/** Returns a message's text; tool calls are shown as JSON. */
function wordsOf({ content, tool_calls: calls }) { return content ?? JSON.stringify(calls); }

function item(message) {
  const who = document.createElement("span");
  who.className = "who";
  who.textContent = NAMES[message.role] ?? message.role;
  const said = document.createElement("div");
  said.className = message.role === "assistant" ? "said made" : "said";
  said.textContent = wordsOf(message);
  const made = document.createElement("li");
  made.className = `message ${message.role}`;
  made.append(who, said);
  return made;
}

export class Chat {
  constructor(sheet) {
    this.sheet = sheet;
    this.list = document.getElementById("messages");
    this.answer = null; // the text node to which a run appends
  }

  show(messages) { this.list.replaceChildren(...messages.map(item)); }

  /** Shows the written message and an empty answer; without a message, the last answer continues. */
  begin() {
    const typed = this.sheet.fresh;
    const goesOn = typed === "" && this.list.lastElementChild?.classList.contains("assistant");
    if (typed) this.list.append(item({ role: "user", content: typed }));
    if (!goesOn) this.list.append(item({ role: "assistant", content: "" }));
    const said = this.list.lastElementChild.lastElementChild;
    said.classList.add("flowing");
    this.answer = said.appendChild(document.createTextNode(""));
    this.sheet.show([], "");
    this.sheet.lock(true);
    this.sheet.toEnd();
  }

  append(text) { this.sheet.follow(() => this.answer.appendData(text)); }

  end() {
    this.list.querySelector(".flowing")?.classList.remove("flowing");
    this.sheet.lock(false);
  }
}
