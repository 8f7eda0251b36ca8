// The playground: one sheet of text that a person and the model write in turn, either on its own or as a conversation
// that the server stores.

import { Conversation } from "./conversation.js";
import { Gauge } from "./gauge.js";
import { keepKey, keptKey, send } from "./key.js";
import { Sheet } from "./sheet.js";
import { ApiError, apiError, complete } from "./sse.js";

const EXAMPLES = [
  "Once upon a time there was a little girl who lived by the sea.",
  "The old lighthouse keeper had not spoken to anyone for a year, when one evening",
  "“Where have you been all night?” said the fox to the hare.",
  "Tom found a small red boat in the garden. He wanted to",
  "It was late in the autumn, and the rain had not ceased since Sunday.",
];

const NUMBERS = ["temperature", "top_p", "top_k", "max_tokens", "repetition_penalty"];

class Playground {
  constructor() {
    const buttons = ["generate", "stop", "again", "back", "clear"];
    for (const id of [...buttons, "error", "status", "spoken", "model", "examples", "settings"]) {
      this[id] = document.getElementById(id);
    }
    this.field = (id) => document.getElementById(id);
    this.seedUsed = document.getElementById("seed-used");
    this.sheet = new Sheet();
    this.gauge = new Gauge();
    this.running = null; // AbortController of the current run
    this.ended = Promise.resolve(); // resolves when the current run has ended
    this.modelName = null;
    this.conversation = new Conversation(this);
    this.listen();
    this.offerExamples();
    this.refresh();
    if (matchMedia("(max-width: 46rem)").matches) this.settings.open = false;
    this.findModel();
    this.conversation.follow();
  }

  listen() {
    document.getElementById("form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.run();
    });
    this.stop.addEventListener("click", () => this.running?.abort());
    this.again.addEventListener("click", async () => { if (await this.takeBack()) this.run(); });
    this.back.addEventListener("click", () => this.takeBack());
    this.clear.addEventListener("click", () => this.wipe());
    this.sheet.write.addEventListener("input", () => { this.sheet.readInput(); this.refresh(); });
    this.seedUsed.addEventListener("click", () => {
      this.field("seed").value = this.seedUsed.textContent;
      this.settings.open = true;
      this.say("Seed set: the same text and settings give the same answer.");
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        this.run();
      } else if (event.key === "Escape") this.running?.abort();
    });
    for (const slide of document.querySelectorAll(".slide")) {
      const number = this.field(slide.dataset.for);
      slide.addEventListener("input", () => { number.value = slide.value; this.forgive(); });
      number.addEventListener("input", () => { slide.value = number.value; });
    }
    this.settings.addEventListener("input", () => this.forgive());
    const key = this.field("api_key");
    key.value = keptKey();
    this.field("key-field").hidden = key.value === "";
    addEventListener("keywanted", () => {
      this.field("key-field").hidden = false;
      this.settings.open = true;
    });
    key.addEventListener("change", () => {
      keepKey(key.value.trim());
      if (location.hash) location.reload(); // retries what could not be opened without a key
      else this.findModel();
    });
  }

  offerExamples() {
    const list = document.createElement("ul");
    for (const text of EXAMPLES) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = text;
      button.addEventListener("click", () => {
        this.sheet.set([{ text, made: false }]);
        this.refresh();
        this.run();
      });
      const item = document.createElement("li");
      item.append(button);
      list.append(item);
    }
    this.examples.append(list);
  }

  /** Asks for the model's name, and repeats that while the server is loading or unreachable. */
  async findModel() {
    try {
      const response = await send("/v1/models");
      if (!response.ok) throw await apiError(response);
      const [model] = (await response.json()).data;
      this.modelName = model.id;
      this.field("translates").hidden = !("max_source_tokens" in model);
      this.model.textContent = this.modelName;
      this.model.dataset.state = "ready";
    } catch (error) {
      const wanted = error.status === 401 && keptKey() === "";
      const words = wanted ? "this server requires an API key" : error.message;
      this.model.textContent = error instanceof ApiError ? words : "the server does not respond";
      this.model.dataset.state = "lost";
      // Without a key, repeating is useless; entering one asks again.
      if (error.status !== 401) setTimeout(() => this.findModel(), 3000);
    }
  }

  request(seed) {
    const request = { prompt: this.sheet.fresh, stream: true, stream_options: { include_usage: true }, return_token_ids: true };
    if (this.modelName) request.model = this.modelName;
    for (const name of NUMBERS) {
      const value = this.field(name).value;
      if (value !== "") request[name] = Number(value); // the server checks the value, so that the limits exist in one place
    }
    request.seed = seed;
    const stops = this.field("stop_strings").value.split("\n").filter((line) => line !== "");
    if (stops.length) request.stop = stops.map((line) => line.replaceAll("\\n", "\n"));
    return request;
  }

  run() {
    if (this.running) return;
    this.forgive();
    if (this.sheet.text === "" && (!this.conversation.on || this.conversation.isEmpty)) {
      this.say("Write something first.");
      this.sheet.write.focus();
      return;
    }
    const typed = this.field("seed").value;
    const seed = typed === "" ? Math.floor(Math.random() * 1e6) : Number(typed);
    const request = this.request(seed);
    this.running = new AbortController();
    this.sheet.begin();
    this.gauge.start();
    this.seedUsed.textContent = String(seed);
    this.say("Writing…");
    this.refresh();
    if (document.activeElement === document.body) this.stop.focus({ preventScroll: true });
    this.ended = this.flow(request, this.running.signal);
  }

  async flow(request, signal) {
    let [counted, failure] = [null, null];
    const talk = this.conversation;
    try {
      counted = await this.read(talk.on ? talk.answer(request, signal) : complete(request, signal));
    } catch (error) {
      failure = error;
      if (error.name === "AbortError") this.say("Stopped");
      else this.complain(error);
    }
    await this.close(counted, failure);
  }

  /** Undoes the last run; returns whether that succeeded. */
  async takeBack() {
    this.forgive();
    if (this.conversation.on) return this.conversation.takeBack();
    this.sheet.takeBack();
    this.say("Undone");
    this.refresh();
    return true;
  }

  /** Shows the chunks of a run and returns the server's count of tokens. */
  async read(chunks) {
    let counted = null;
    for await (const chunk of chunks) {
      const choice = chunk.choices?.[0];
      if (choice) {
        const tokens = choice.token_ids?.length ?? (choice.text ? 1 : 0);
        if (tokens) this.gauge.add(tokens);
        if (choice.text) this.sheet.append(choice.text);
        if (choice.finish_reason) this.say(ending(choice.finish_reason));
      }
      if (chunk.usage) counted = chunk.usage.completion_tokens;
    }
    return counted;
  }

  async close(counted, failure) {
    const written = this.sheet.pieces.at(-1).text;
    this.gauge.finish(counted);
    this.sheet.end();
    if (this.conversation.on) await this.conversation.settle(failure);
    this.running = null;
    const onStop = document.activeElement === this.stop;
    this.refresh();
    if (onStop) this.generate.focus({ preventScroll: true });
    this.spoken.textContent = written;
  }

  wipe() {
    if (this.conversation.on) this.conversation.tell("");
    else this.sheet.set([]);
    this.forgive();
    this.spoken.textContent = "";
    this.say("Ready");
    this.refresh();
    this.sheet.write.focus();
  }

  say(text) { this.status.textContent = text; }

  complain(error) {
    let text = error.message;
    if (!(error instanceof ApiError)) {
      console.error(error);
      text = "this page has failed; see the browser's console for the reason";
    }
    if (error.status === 429 || error.status === 503) {
      const wait = Number(error.retryAfter);
      text += wait > 0 ? `; try again in ${wait} s` : "; try again in a moment";
    }
    this.error.textContent = `${text.charAt(0).toUpperCase()}${text.slice(1)}.`;
    this.error.hidden = false;
    this.say("Failed");
    const field = error.param && this.settings.querySelector(`#${CSS.escape(error.param === "stop" ? "stop_strings" : error.param)}`);
    if (field) {
      field.setAttribute("aria-invalid", "true");
      this.settings.open = true;
    }
  }

  forgive() {
    this.error.hidden = true;
    this.error.textContent = "";
    for (const field of document.querySelectorAll("[aria-invalid]")) field.removeAttribute("aria-invalid");
  }

  /** Updates the buttons and examples to what is possible now. */
  refresh() {
    const busy = this.running !== null;
    const empty = this.sheet.text === "";
    const talk = this.conversation;
    document.body.classList.toggle("running", busy);
    this.generate.disabled = busy;
    this.stop.disabled = !busy;
    this.again.disabled = busy || !(talk.on ? talk.canRepeat : this.sheet.endsWithRun);
    this.back.disabled = busy || !(talk.on ? talk.canTakeBack : this.sheet.endsWithRun);
    this.clear.disabled = busy || this.sheet.fresh === "";
    this.seedUsed.disabled = busy || this.seedUsed.textContent === "–";
    this.examples.hidden = busy || !empty || (talk.on && !talk.isEmpty);
    const continues = talk.on ? !talk.isEmpty && this.sheet.fresh === "" : this.sheet.endsWithRun;
    this.generate.textContent = continues && !busy ? "Continue" : "Generate";
    talk.refresh(busy);
  }
}

function ending(reason) {
  if (reason === "length") return "Stopped at the token limit. Continue?";
  if (reason === "stop") return "Finished";
  return `Ended: ${reason}.`;
}

new Playground();
