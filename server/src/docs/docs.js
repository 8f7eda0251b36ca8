// Renders openapi.json: the routes by tag, with their parameters, bodies and responses, and a form that sends a request.

import { curl } from "../playground/code.js";
import { keepKey, keptKey, send } from "../playground/key.js";

const METHODS = ["get", "post", "put", "patch", "delete"];
const JSON_TYPE = "application/json";
let api; // the description

/** Creates an element. Children are nodes or strings; empty ones are left out. */
function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children.filter((child) => child !== undefined && child !== null && child !== ""));
  return node;
}

/** Converts text in which `backticks` mark code into nodes. */
function prose(text = "") {
  return text.split("`").map((part, i) => (i % 2 ? el("code", {}, part) : part));
}

const nameOf = (ref) => ref.split("/").pop();
const resolve = (schema) => (schema?.$ref ? api.components.schemas[nameOf(schema.$ref)] : schema);

/** Returns the type of a schema in one line. */
function typeOf(schema = {}) {
  if (schema.$ref) return nameOf(schema.$ref);
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  const options = schema.oneOf ?? schema.anyOf;
  if (options && !schema.properties) return [...new Set(options.map(typeOf))].join(" | ");
  if (schema.type === "array") return `array of ${schema.items?.oneOf ? `(${typeOf(schema.items)})` : typeOf(schema.items)}`;
  return [schema.type ?? "any"].flat().join(" | ");
}

/** Returns the bounds of a schema in words. */
function boundsOf(schema) {
  const named = {
    minimum: "at least", exclusiveMinimum: "above", maximum: "at most", minLength: "min. length", maxLength: "max. length",
    minItems: "min. items", maxItems: "max. items", maxProperties: "max. properties", pattern: "pattern",
  };
  return Object.entries(named).filter(([key]) => schema[key] !== undefined)
    .map(([key, words]) => `${words} ${key === "exclusiveMinimum" && schema[key] < 1e-9 ? 0 : schema[key]}`).join(", ");
}

/** Returns the named schemas that a schema consists of, each in a fold that is rendered when it is opened. */
function folds(schema) {
  const refs = [schema, ...(schema.oneOf ?? []), ...(schema.anyOf ?? []), schema.items ?? {}, ...(schema.items?.oneOf ?? [])];
  return [...new Set(refs.map((part) => part.$ref).filter(Boolean))].map((ref) => {
    const fold = el("details", {}, el("summary", {}, nameOf(ref)));
    fold.addEventListener("toggle", () => fold.append(details({ $ref: ref })), { once: true });
    return fold;
  });
}

function field(name, schema, required, description) {
  const bounds = boundsOf(schema);
  const about = description ?? schema.description;
  return el("li", {},
    el("code", {}, name), " ", el("span", { class: "type" }, typeOf(schema)), " ",
    required ? el("span", { class: "required" }, "required") : "",
    about || bounds ? el("p", {}, ...prose(about), about && bounds ? " " : "", bounds ? `(${bounds})` : "") : "",
    ...folds(schema));
}

/** Renders what a schema allows: its fields, or its type and the schemas that it refers to. */
function details(schema) {
  const found = resolve(schema) ?? {};
  const fields = Object.entries(found.properties ?? {});
  if (fields.length === 0) return el("ul", { class: "rows" }, field("value", found, false));
  const about = found.description ? [el("p", { class: "hint" }, ...prose(found.description))] : [];
  const required = new Set(found.required);
  fields.sort(([a], [b]) => required.has(b) - required.has(a));
  return el("div", {}, ...about,
    el("ul", { class: "rows" }, ...fields.map(([name, type]) => field(name, type, required.has(name)))));
}

function parameters(operation) {
  if (!operation.parameters?.length) return "";
  return el("section", {}, el("h3", {}, "Parameters"), el("ul", { class: "rows" },
    ...operation.parameters.map((it) => field(`${it.name} (${it.in})`, it.schema, it.required, it.description))));
}

function requestBody(operation) {
  const body = operation.requestBody;
  if (!body) return "";
  const [type, content] = Object.entries(body.content)[0];
  return el("section", {}, el("h3", {}, `Body: ${type}${body.required ? "" : " (optional)"}`), details(content.schema));
}

function responses(operation) {
  const list = Object.entries(operation.responses).map(([status, response]) => {
    const headers = Object.keys(response.headers ?? {}).join(", ");
    const contents = Object.entries(response.content ?? {}).map(([type, { schema }]) => {
      const events = resolve(schema?.properties?.data?.anyOf?.[0]?.contentSchema);
      const fold = el("details", {}, el("summary", {}, `${type}${schema?.$ref ? `: ${nameOf(schema.$ref)}` : ""}`));
      const about = schema?.description ? el("p", {}, ...prose(schema.description)) : "";
      fold.addEventListener("toggle", () => fold.append(about, details(events ?? schema)), { once: true });
      return fold;
    });
    return el("li", {}, el("code", {}, status), " ", ...prose(response.description),
      headers ? el("p", {}, `Headers: ${headers}`) : "", ...contents);
  });
  return el("section", {}, el("h3", {}, "Responses"), el("ul", { class: "rows" }, ...list));
}

/** Returns the request that a form describes: its address and the options of `fetch`. */
function requestOf(method, path, form) {
  const query = new URLSearchParams();
  const headers = {};
  for (const input of form.querySelectorAll("[data-in]")) {
    const { in: place, name } = input.dataset;
    if (place === "path") path = path.replace(`{${name}}`, encodeURIComponent(input.value));
    else if (input.value && place === "query") query.set(name, input.value);
    else if (input.value && place === "header") headers[name] = input.value;
  }
  const input = form.querySelector("[data-body]");
  const body = input?.files ? input.files[0] : input?.value;
  if (body) headers["content-type"] = input.dataset.body;
  const address = new URL(`.${path}${query.size ? `?${query}` : ""}`, document.baseURI).href;
  return [address, { method: method.toUpperCase(), headers, ...(body ? { body } : {}) }];
}

/** Shows a response in `output` as it arrives; binary data becomes a link. */
async function show(response, output) {
  output.textContent = `${response.status} ${response.statusText}\n\n`;
  const type = response.headers.get("content-type") ?? "";
  if (type.startsWith("application/octet-stream")) {
    const blob = await response.blob();
    output.append(el("a", { href: URL.createObjectURL(blob), download: "session.tidegate" }, `Save ${blob.size} bytes`));
  } else if (type.startsWith(JSON_TYPE)) {
    output.append(JSON.stringify(await response.json(), null, 2));
  } else if (response.body) {
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (let part = await reader.read(); !part.done; part = await reader.read()) output.append(part.value);
  }
}

function tryIt(method, path, operation) {
  const form = el("form", { class: "try" }, el("h3", {}, "Try it"));
  for (const { name, in: place, required, schema } of operation.parameters ?? []) {
    const input = el("input", { "data-in": place, "data-name": name, autocomplete: "off", ...(required ? { required: "" } : {}) });
    if (schema.enum) input.placeholder = schema.enum.join(" or ");
    form.append(el("label", {}, `${name} (${place})`, input));
  }
  const [type, content] = Object.entries(operation.requestBody?.content ?? {})[0] ?? [];
  if (type === JSON_TYPE) {
    const examples = Object.entries(content.examples ?? {});
    const text = el("textarea", { "data-body": type, spellcheck: "false" });
    const choose = (index) => { text.value = JSON.stringify(examples[index]?.[1].value ?? {}, null, 2); };
    choose(0);
    if (examples.length > 1) {
      const select = el("select", {}, ...examples.map(([name], i) => el("option", { value: i }, name)));
      select.addEventListener("change", () => choose(select.value));
      form.append(el("label", {}, "Example", select));
    }
    form.append(el("label", {}, "Body", text));
  } else if (type) {
    form.append(el("label", {}, "Body", el("input", { type: "file", "data-body": type })));
  }
  const command = el("pre", { "aria-label": "The same request with curl", tabindex: "0" });
  const output = el("pre", { role: "log", "aria-label": "Response", tabindex: "0", hidden: "" });
  const update = () => {
    const [address, request] = requestOf(method, path, form);
    command.textContent = curl(address, { ...request, hasKey: keptKey() !== "" });
  };
  form.append(command, el("button", { class: "primary", type: "submit" }, "Send"), output);
  form.addEventListener("input", update);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    output.hidden = false;
    output.textContent = "…";
    try {
      await show(await send(...requestOf(method, path, form)), output);
    } catch (error) {
      output.append(String(error));
    }
  });
  update();
  return form;
}

/** Returns one route, which is rendered when it is opened. */
function operationOf(method, path, operation) {
  const fold = el("details", { class: "operation", id: operation.operationId },
    el("summary", {}, el("span", { class: `method ${method}` }, method), el("code", {}, path),
      el("span", { class: "hint" }, operation.summary ?? "")));
  fold.dataset.words = `${method} ${path} ${operation.summary} ${operation.description ?? ""}`.toLowerCase();
  fold.addEventListener("toggle", () => {
    const about = operation.description ? el("p", {}, ...prose(operation.description)) : "";
    fold.append(el("div", {}, about, parameters(operation), requestBody(operation), responses(operation),
      tryIt(method, path, operation)));
  }, { once: true });
  return fold;
}

function filter(words) {
  for (const section of document.querySelectorAll(".tag")) {
    const operations = [...section.querySelectorAll(".operation")];
    for (const it of operations) it.hidden = !it.dataset.words.includes(words);
    section.hidden = operations.every((it) => it.hidden);
  }
}

/** Opens the route that the address names. */
function openNamed() {
  const found = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!found?.matches(".operation")) return;
  found.open = true;
  found.scrollIntoView();
}

async function start() {
  const status = document.getElementById("status");
  const response = await fetch("openapi.json").catch(() => undefined);
  if (!response?.ok) {
    status.textContent = "The description is not available yet: the model is loading, or the server is down.";
    return;
  }
  api = await response.json();
  document.getElementById("about").textContent = `${api.info.description} Version ${api.info.version}.`;
  const operations = Object.entries(api.paths).flatMap(([path, item]) =>
    METHODS.filter((method) => item[method]).map((method) => [method, path, item[method]]));
  const sections = api.tags.map(({ name, description }) => el("section", { class: "tag" },
    el("h2", {}, name.charAt(0).toUpperCase() + name.slice(1)), el("p", { class: "hint" }, description ?? ""),
    ...operations.filter(([, , operation]) => operation.tags?.includes(name)).map((it) => operationOf(...it))));
  status.replaceWith(...sections);
  const search = document.getElementById("filter");
  search.addEventListener("input", () => filter(search.value.trim().toLowerCase()));
  const key = document.getElementById("key");
  key.value = keptKey();
  key.addEventListener("change", () => keepKey(key.value.trim()));
  addEventListener("hashchange", openNamed);
  openNamed();
}

start();
