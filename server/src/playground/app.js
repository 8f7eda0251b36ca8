// The playground: one sheet of text that a person and the model write in turn, either on its own or as a conversation
// that the server stores.

import { Arrivals } from "./arrivals.js";
import { curl, python } from "./code.js";
import { Conversation } from "./conversation.js";
import { Gauge } from "./gauge.js";
import { Health } from "./health.js";
import { keepKey, keptKey } from "./key.js";
import { copied } from "./reader.js";
import { remember, remembered } from "./remember.js";
import { Sheet } from "./sheet.js";
import { ApiError, complete } from "./sse.js";

const EXAMPLES = [
  "Once upon a time there was a little girl who lived by the sea.",
  "The old lighthouse keeper had not spoken to anyone for a year, when one evening",
  "“Where have you been all night?” said the fox to the hare.",
  "Tom found a small red boat in the garden. He wanted to",
  "It was late in the autumn, and the rain had not ceased since Sunday.",
];

/** Settings that may be left to the model, with llama.cpp's names for them. */
const CHOSEN = { temperature: "temperature", top_p: "top_p", top_k: "top_k", repetition_penalty: "repeat_penalty" };

const NUMBERS = [...Object.keys(CHOSEN), "max_tokens"];

/** Words for why a run has ended. */
const ENDINGS = { stop: "Finished", length: "Reached the token limit" };

/** Settings that a reload keeps. */
const KEPT = [...NUMBERS, "seed", "stop_strings"];

class Playground {
  constructor() {
    const buttons = ["generate", "stop", "again", "back", "clear"];
    for (const id of [...buttons, "error", "status", "spoken", "examples", "settings"]) {
      this[id] = document.getElementById(id);
    }
    this.field = (id) => document.getElementById(id);
    this.seedUsed = document.getElementById("seed-used");
    this.sheet = new Sheet();
    this.gauge = new Gauge();
    this.arrivals = new Arrivals((text) => this.paper.append(text));
    this.running = null; // AbortController of the current run
    this.ended = Promise.resolve(); // resolves when the current run has ended
    this.modelName = null;
    this.draft = null; // of a conversation, from before a reload
    this.conversation = new Conversation(this);
    this.restore();
    this.listen();
    this.offerExamples();
    this.refresh();
    if (matchMedia("(max-width: 46rem)").matches) this.settings.open = false;
    this.health = new Health((model, props) => this.serve(model, props));
    this.conversation.follow();
  }

  /** The view that shows a run: the sheet, or the messages of a chat. */
  get paper() { return this.conversation.chats ? this.conversation.chat : this.sheet; }

  listen() {
    document.getElementById("form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.run();
    });
    this.stop.addEventListener("click", () => this.halt());
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
      } else if (event.key === "Escape") this.halt();
    });
    for (const slide of document.querySelectorAll(".slide")) {
      const number = this.field(slide.dataset.for);
      this.slide(number.id);
      slide.addEventListener("input", () => { number.value = slide.value; this.forgive(); });
      number.addEventListener("input", () => this.slide(number.id));
    }
    this.settings.addEventListener("input", () => this.forgive());
    this.field("copy-curl").addEventListener("click", () => this.copyCode("curl"));
    this.field("copy-python").addEventListener("click", () => this.copyCode("Python"));
    addEventListener("pagehide", () => this.save());
    document.addEventListener("visibilitychange", () => { if (document.hidden) this.save(); });
    this.listenForKey();
  }

  listenForKey() {
    const key = this.field("api_key");
    key.value = keptKey();
    this.field("key-field").hidden = key.value === "";
    addEventListener("keywanted", () => {
      this.field("key-field").hidden = false;
      this.settings.open = true;
      key.focus();
    });
    key.addEventListener("change", () => {
      keepKey(key.value.trim());
      if (location.hash) location.reload(); // retries what could not be opened without a key
      else this.health.check();
    });
  }

  /** Stores settings and unsent text for the next load of the page. */
  save() {
    const talk = this.conversation;
    remember("settings", Object.fromEntries(KEPT.map((id) => [id, this.field(id).value])));
    remember("sheet", talk.on ? talk.sheetPieces : this.sheet.pieces, "session");
    const draft = talk.running?.typed ?? this.sheet.fresh;
    remember("draft", talk.on ? { place: talk.place, draft } : this.draft, "session");
  }

  restore() {
    for (const [id, value] of Object.entries(remembered("settings") ?? {})) {
      if (KEPT.includes(id)) this.field(id).value = value;
    }
    this.sheet.set(remembered("sheet", "session") ?? []);
    this.draft = remembered("draft", "session");
  }

  /** Returns the unsent text of a conversation from before a reload, once. */
  takeDraft(place) {
    if (this.draft?.place !== place) return "";
    const { draft } = this.draft;
    this.draft = null;
    return draft;
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

  /** Called whenever the server appears. */
  serve(model, { chat_template: template, default_generation_settings: { params } }) {
    this.modelName = model.id;
    this.field("translates").hidden = !("max_source_tokens" in model);
    this.conversation.offerChat(Boolean(template));
    // An empty field leaves the choice to the model, and shows it.
    for (const [name, theirs] of Object.entries(CHOSEN)) {
      const choice = Number(params[theirs].toFixed(3)); // numbers of 32 bits have more digits
      this.field(name).placeholder = choice;
      this.slide(name);
    }
  }

  /** Moves a number's slider, if it has one, to the value in effect. */
  slide(name) {
    const slider = document.querySelector(`.slide[data-for=${name}]`);
    if (slider) slider.value = this.field(name).value || this.field(name).placeholder;
  }

  /** Returns the request for the unsent text and the settings; `seed` may be undefined. */
  request(seed) {
    const request = { prompt: this.sheet.fresh };
    if (this.modelName) request.model = this.modelName;
    for (const name of NUMBERS) {
      const value = this.field(name).value;
      if (value !== "") request[name] = Number(value); // the server checks the value, so that the limits exist in one place
    }
    if (seed !== undefined) request.seed = seed;
    const stops = this.field("stop_strings").value.split("\n").filter((line) => line !== "");
    if (stops.length) request.stop = stops.map((line) => line.replaceAll("\\n", "\n"));
    return request;
  }

  get chosenSeed() {
    const { value } = this.field("seed");
    return value === "" ? undefined : Number(value);
  }

  run() {
    if (this.running) return;
    this.forgive();
    if (this.sheet.text === "" && (!this.conversation.on || this.conversation.isEmpty)) {
      this.say("Write something first.");
      this.sheet.write.focus();
      return;
    }
    const seed = this.chosenSeed ?? Math.floor(Math.random() * 1e6);
    const request = { ...this.request(seed), stream: true, stream_options: { include_usage: true }, return_token_ids: true };
    this.running = new AbortController();
    this.arrivals.start();
    this.paper.begin();
    this.gauge.start();
    this.seedUsed.textContent = String(seed);
    this.say("Writing");
    this.refresh();
    if (document.activeElement === document.body) this.stop.focus({ preventScroll: true });
    this.ended = this.flow(request, this.running.signal);
  }

  /** Stops the run; what is shown now stays, and nothing more is shown. */
  halt() {
    if (!this.running || this.running.signal.aborted) return;
    this.arrivals.stop();
    this.running.abort();
    this.say("Stopping");
  }

  async flow(request, signal) {
    let failure = null;
    const talk = this.conversation;
    try {
      await this.read(talk.on ? talk.answer(request, signal) : complete(request, signal));
    } catch (error) {
      failure = error;
      if (error.name !== "AbortError") this.complain(error);
    }
    await this.close(failure);
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

  /** Shows the parts of a run's answer. */
  async read(parts) {
    for await (const { text, tokens, ending, timings, usage } of parts) {
      if (text || tokens) {
        this.gauge.add(tokens);
        this.arrivals.add(text, tokens);
      }
      if (ending) this.say(ENDINGS[ending] ?? `Ended: ${ending}.`);
      if (timings) this.gauge.time(timings);
      if (usage) this.gauge.count(usage.completion_tokens);
    }
  }

  async close(failure) {
    const { paper, arrivals } = this;
    arrivals.flush();
    if (failure) this.gauge.count(arrivals.tokens);
    this.gauge.finish();
    if (this.conversation.on) await this.conversation.settle(failure, arrivals);
    paper.end();
    if (failure?.name === "AbortError" && this.error.hidden) this.say("Stopped");
    this.running = null;
    const onStop = document.activeElement === this.stop;
    this.refresh();
    if (onStop) this.generate.focus({ preventScroll: true });
    this.spoken.textContent = arrivals.text;
  }

  wipe() {
    if (this.conversation.on) this.conversation.display("");
    else this.sheet.set([]);
    this.forgive();
    this.spoken.textContent = "";
    this.say("Ready");
    this.refresh();
    this.sheet.write.focus();
  }

  /** Copies the request that Generate would send, as code; shows it instead if the browser does not allow copying. */
  async copyCode(language) {
    const request = this.request(this.chosenSeed);
    const turn = this.conversation.on ? this.conversation.prepare(request) : request;
    const code = this.code(language, turn);
    if (await copied(code)) this.say(`Copied as ${language}`);
    else this.conversation.reader.open(`This request as ${language}`, [code], true);
  }

  code(language, request) {
    const { origin } = location;
    const hasKey = keptKey() !== "";
    if (language === "Python") return python(origin, request, hasKey);
    const path = "messages" in request ? "/v1/chat/completions" : "/v1/completions";
    const headers = { "content-type": "application/json" };
    return curl(origin + path, { headers, body: JSON.stringify(request, null, 2), hasKey });
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
    this.generate.textContent = continues && !busy ? "Continue" : talk.chats ? "Send" : "Generate";
    talk.refresh(busy);
  }
}

new Playground();
