// The chat: what was said, the request that runs, and how both are shown. Text of the model is only ever set as text.
import { byId, make, showTalk, watch } from "./cache.js";

const prompt = byId("prompt");
const fingers = matchMedia("(pointer: coarse)");
let turns = []; // of {message, node}
let images = []; // data URLs of the message that is being written
let running = null; // the AbortController of the request that runs

function headers() {
  const key = byId("key").value.trim();
  return { "Content-Type": "application/json", ...(key && { Authorization: `Bearer ${key}` }) };
}

function request() {
  const effort = byId("thinking").value, most = byId("max-tokens").value, temperature = byId("temperature").value;
  const system = byId("system").value.trim(), tools = byId("tools").value.trim();
  return {
    messages: [...(system ? [{ role: "system", content: system }] : []), ...turns.map((turn) => turn.message)],
    stream: true,
    stream_options: { include_usage: true },
    thinking: { type: effort ? "enabled" : "disabled" },
    ...(effort && { reasoning_effort: effort }),
    ...(temperature && { temperature: Number(temperature) }),
    ...(most && { max_tokens: Number(most) }),
    ...(tools && { tools: list(tools) }),
  };
}

function list(text) {
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new Error(`Tools: not JSON (${error.message})`);
  }
}

// The JSON objects of a stream of server-sent events, as they come.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    waiting += value;
    const whole = waiting.split("\n\n");
    waiting = whole.pop();
    for (const event of whole) {
      const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim()).join("\n");
      if (data && data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

// What a screen reader is told.
function tell(text) {
  byId("live").textContent = text;
}

function near(log) {
  return log.scrollHeight - log.scrollTop - log.clientHeight < 80;
}

function turn(role, name) {
  byId("welcome")?.remove();
  const node = make("article", `turn ${role}`);
  node.append(make("h2", "", name));
  byId("log").append(node);
  byId("log").scrollTop = byId("log").scrollHeight;
  return node;
}

// One answer as it grows: thinking apart, then text, then tool calls.
class Answer {
  constructor() {
    this.node = turn("assistant running", "Rorqual");
    this.text = this.node.appendChild(make("div", "words"));
    this.message = { role: "assistant", content: "" };
    this.said = ""; // not yet announced
    this.begun = performance.now();
    this.first = 0;
  }

  get empty() {
    return !this.message.content && !this.message.reasoning_content && !this.message.tool_calls;
  }

  add(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const log = byId("log"), follow = near(log), { content, reasoning_content: thought, tool_calls: calls } = choice.delta;
    if (thought) this.think(thought);
    if (content) this.say(content);
    for (const call of calls ?? []) this.call(call);
    if (!this.first && !this.empty) this.first = performance.now();
    this.reason = choice.finish_reason ?? this.reason;
    if (follow) log.scrollTop = log.scrollHeight;
  }

  think(text) {
    if (!this.thought) {
      const box = make("details", "thinking");
      box.open = true;
      this.thought = make("div", "words");
      box.append(make("summary", "", "Thinking"), this.thought);
      this.node.insertBefore(box, this.text);
      tell("Thinking");
    }
    this.message.reasoning_content = (this.message.reasoning_content ?? "") + text;
    this.thought.append(text);
  }

  say(text) {
    if (!this.message.content && this.thought) this.thought.parentElement.open = false;
    this.message.content += text;
    this.text.append(text);
    this.said += text;
    // Whole sentences: a screen reader that is told of every token cannot be followed.
    const end = Math.max(...[". ", "! ", "? ", "\n"].map((mark) => this.said.lastIndexOf(mark))) + 1;
    if (end) this.announce(end);
  }

  announce(end) {
    tell(this.said.slice(0, end));
    this.said = this.said.slice(end);
  }

  call({ index = 0, id, function: given = {} }) {
    const calls = (this.message.tool_calls ??= []), shown = (this.shown ??= []);
    if (!calls[index]) {
      calls[index] = { id, type: "function", function: { name: "", arguments: "" } };
      const box = make("div", "tool"), name = make("strong"), text = make("pre");
      box.append(make("span", "quiet", "calls "), name, text);
      this.node.append(box);
      shown[index] = { box, name, text };
    }
    calls[index].id ??= id;
    calls[index].function.name += given.name ?? "";
    calls[index].function.arguments += given.arguments ?? "";
    shown[index].name.textContent = calls[index].function.name;
    shown[index].text.append(given.arguments ?? "");
  }

  // How it ended. Arguments that were cut are no arguments: such calls do not go into the history.
  end(how) {
    const done = performance.now(), follow = near(byId("log"));
    this.node.classList.remove("running");
    if (how && this.message.tool_calls) delete this.message.tool_calls;
    if (!how) this.message.tool_calls?.forEach((call, at) => this.shown[at].box.append(result(call)));
    const notes = [how || { length: "cut at the token limit" }[this.reason] || (this.empty && "no answer")];
    if (this.usage) {
      notes.push(`${this.usage.completion_tokens} tokens`);
      showTalk(this.usage, (this.first - this.begun) / 1000, (done - this.first) / 1000);
    }
    this.node.append(make("p", "foot quiet", notes.filter(Boolean).join(" · ")));
    const called = this.message.tool_calls?.map((call) => call.function.name).join(", ");
    tell([this.said, called && `It calls ${called} and waits for the result.`, notes[0]].filter(Boolean).join(" "));
    this.said = "";
    if (follow) byId("log").scrollTop = byId("log").scrollHeight;
  }
}

// Where a person gives what a tool would have answered; after the last of them the model goes on.
function result(call) {
  const form = make("form", "row"), field = make("input");
  field.placeholder = "Its result; Enter sends it";
  field.setAttribute("aria-label", `Result of ${call.function.name}`);
  form.append(field);
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (running || field.disabled) return;
    field.disabled = true;
    turns.push({ message: { role: "tool", tool_call_id: call.id, content: field.value }, node: form });
    const open = form.closest(".turn").querySelector(".tool input:enabled");
    (open ?? byId("log")).focus(); // a disabled field has no focus
    if (!open) answer();
  });
  return form;
}

function showError(text) {
  const box = make("p", "error", text);
  box.setAttribute("role", "alert");
  byId("log").append(box);
  box.scrollIntoView({ block: "end" });
}

function busy(controller) {
  running = controller;
  if (!controller && document.activeElement === byId("stop")) prompt.focus(); // it is hidden now
  byId("stop").hidden = !controller;
  byId("send").hidden = Boolean(controller);
  byId("again").disabled = Boolean(controller) || !turns.length;
  byId("log").setAttribute("aria-busy", String(Boolean(controller)));
}

async function answer() {
  const own = new AbortController(), found = new Answer();
  busy(own);
  let how = "";
  try {
    const response = await fetch("/v1/chat/completions", { method: "POST", headers: headers(), body: JSON.stringify(request()), signal: own.signal });
    if (!response.ok) throw new Error((await response.json().catch(() => null))?.error?.message ?? `The server answered ${response.status}`);
    for await (const chunk of events(response)) found.add(chunk);
    if (!found.reason) throw new Error("The answer broke off");
  } catch (error) {
    how = own.signal.aborted ? "stopped" : "failed";
    if (how === "failed") showError(error instanceof TypeError ? "The server does not answer" : error.message);
  }
  if (running !== own) return; // a new chat began meanwhile
  found.end(how);
  if (!found.empty) turns.push({ message: found.message, node: found.node });
  else if (how) found.node.remove();
  if (how === "failed" && found.empty) takeBack();
  busy(null);
}

// A message that the server refused goes back to where it was written; left in the history it would be refused for ever.
function takeBack() {
  if (turns.at(-1)?.message.role !== "user") return;
  const { message, node } = turns.pop();
  const parts = typeof message.content === "string" ? [{ type: "text", text: message.content }] : message.content;
  node.remove();
  if (!prompt.value) prompt.value = parts.find((part) => part.type === "text")?.text ?? "";
  images.push(...parts.filter((part) => part.type === "image_url").map((part) => part.image_url.url));
  showImages();
}

function send() {
  const text = prompt.value.trim();
  if (running || (!text && !images.length)) return;
  const node = turn("user", "You"), said = make("div", "said");
  for (const url of images) said.append(picture(url));
  said.append(make("div", "words", text));
  node.append(said);
  const pictures = images.map((url) => ({ type: "image_url", image_url: { url } }));
  turns.push({ message: { role: "user", content: pictures.length ? [...pictures, { type: "text", text }] : text }, node });
  prompt.value = "";
  images = [];
  showImages();
  // The button that may have had the focus is hidden now. In the field a phone's keyboard would cover the answer.
  (fingers.matches ? byId("log") : prompt).focus();
  answer();
}

function regenerate() {
  if (running) return;
  byId("log").focus(); // the button is disabled now
  while (turns.at(-1)?.message.role === "assistant") turns.pop().node.remove();
  if (turns.length) answer();
}

function newChat() {
  running?.abort();
  turns = [];
  byId("log").replaceChildren();
  showTalk(null);
  busy(null);
  prompt.focus();
}

function picture(url) {
  const image = make("img");
  image.src = url;
  image.alt = "image of this message";
  return image;
}

function showImages() {
  byId("images").replaceChildren(...images.map((url, at) => {
    const item = make("li"), remove = make("button", "plain", "Remove");
    remove.type = "button";
    remove.setAttribute("aria-label", `Remove image ${at + 1}`);
    remove.addEventListener("click", () => { images.splice(at, 1); showImages(); prompt.focus(); });
    item.append(picture(url), remove);
    return item;
  }));
}

function take(files) {
  for (const file of files) {
    if (!file.type.startsWith("image/")) {
      showError(`${file.name} is no image; nothing else can be sent`);
      continue;
    }
    const reader = new FileReader();
    reader.addEventListener("load", () => { images.push(reader.result); showImages(); });
    reader.readAsDataURL(file);
  }
}

const on = (id, kind, handle) => byId(id).addEventListener(kind, handle);
on("composer", "submit", (event) => { event.preventDefault(); send(); });
on("prompt", "keydown", (event) => {
  // A phone's keyboard has no Shift+Enter: there Enter breaks the line, and the button sends.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || fingers.matches) return;
  event.preventDefault();
  send();
});
on("prompt", "paste", (event) => take(event.clipboardData.files));
document.addEventListener("keydown", (event) => { if (event.key === "Escape") running?.abort(); });
on("stop", "click", () => { running?.abort(); prompt.focus(); });
on("again", "click", regenerate);
on("new-chat", "click", newChat);
on("file", "change", (event) => { take(event.target.files); event.target.value = ""; });
// Anywhere on the page: a file that is dropped beside the chat would otherwise take the page's place.
for (const kind of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(kind, (event) => {
    event.preventDefault();
    byId("chat").classList.toggle("dropping", kind === "dragover");
    if (kind === "drop") take(event.dataTransfer.files);
  });
}
on("key", "input", () => sessionStorage.setItem("key", byId("key").value));
on("panel-toggle", "click", () => {
  const shown = document.body.classList.toggle("panel");
  byId("panel-toggle").setAttribute("aria-expanded", String(shown));
  byId("panel-toggle").textContent = shown ? "Chat" : "Cache";
});

byId("key").value = sessionStorage.getItem("key") ?? "";
watch(headers);
prompt.focus();
