// A request as code that sends it: curl, or Python with the package `openai`.

/** Fields for which OpenAI's package has parameters; it takes others in `extra_body`. */
const KNOWN = ["model", "prompt", "messages", "max_tokens", "temperature", "top_p", "seed", "stop"];

function shellQuoted(text) { return `'${text.replaceAll("'", "'\\''")}'`; }

/** Returns a curl command. `body` is text or a file. */
export function curl(address, { method = "POST", headers = {}, body, hasKey }) {
  const lines = [`curl -X ${method} ${shellQuoted(address)}`];
  if (hasKey) lines.push('-H "authorization: Bearer $TIDEGATE_API_KEY"');
  for (const [name, value] of Object.entries(headers)) lines.push(`-H ${shellQuoted(`${name}: ${value}`)}`);
  if (body) lines.push(typeof body === "string" ? `-d ${shellQuoted(body)}` : `--data-binary @${shellQuoted(body.name)}`);
  return lines.join(" \\\n  ");
}

/** Converts a value to a Python literal. JSON is Python except for null, true and false; requests contain only null. */
function literal(value) { return value === null ? "None" : JSON.stringify(value); }

/** Returns a Python program that prints the answer to a completion request, or a chat request if it has messages. */
export function python(origin, request, hasKey) {
  const isChat = "messages" in request;
  const fields = isChat ? request : { prompt: null, ...request }; // the package requires a prompt
  const own = Object.entries(fields).filter(([name]) => KNOWN.includes(name));
  const extra = Object.entries(fields).filter(([name]) => !KNOWN.includes(name));
  const lines = own.map(([name, value]) => `    ${name}=${literal(value)},`);
  if (extra.length) lines.push(`    extra_body={${extra.map(([name, value]) => `"${name}": ${literal(value)}`).join(", ")}},`);
  const key = hasKey ? 'os.environ["TIDEGATE_API_KEY"]' : '"none"';
  return [
    ...(hasKey ? ["import os", ""] : []),
    "from openai import OpenAI", "",
    `client = OpenAI(base_url=${literal(`${origin}/v1`)}, api_key=${key})`,
    `answer = client.${isChat ? "chat.completions" : "completions"}.create(`, ...lines, ")",
    `print(answer.choices[0].${isChat ? "message.content" : "text"})`, "",
  ].join("\n");
}
