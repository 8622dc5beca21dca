// The panel beside the chat: what the engine says of itself, asked once a second.

export const byId = (id) => document.getElementById(id);

export function make(tag, className = "", text = "") {
  const node = document.createElement(tag);
  node.className = className;
  node.textContent = text;
  return node;
}

const SECONDS = 60;
const LETTERS = { full: "F", reindex: "I", reuse: "R", swa: "W" };
const number = new Intl.NumberFormat("en");
const speeds = [];
let last = null;
let asking = false;

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  for (; count >= 1024 && at < units.length - 1; at++) count /= 1024;
  return `${at && count < 100 ? count.toFixed(1) : Math.round(count)} ${units[at]}`;
}

const percent = (part, whole) => (whole ? (100 * part) / whole : 0);

// A list of figures, each with a bar below that shows its share.
function measured(list, rows) {
  list.replaceChildren(...rows.map(([name, shown, share]) => {
    const row = make("div", "measure");
    const bar = make("dd", "measured");
    const fill = make("i");
    fill.style.width = `${share}%`;
    bar.setAttribute("aria-hidden", "true");
    bar.append(fill);
    row.append(make("dt", "", name), make("dd", "", shown), bar);
    return row;
  }));
}

function showPages(stats) {
  for (const kind of ["used", "cached", "free"]) byId(`pages-${kind}`).textContent = number.format(stats[`pages_${kind}`]);
  for (const kind of ["used", "cached"]) byId(`bar-${kind}`).style.width = `${percent(stats[`pages_${kind}`], stats.pages)}%`;
  byId("pages-total").textContent = `${number.format(stats.pages)} of ${stats.page_tokens} tokens`;
  const groups = Object.entries(stats.bytes_by_group).filter(([, size]) => size);
  const total = groups.reduce((sum, [, size]) => sum + size, 0);
  byId("bytes-total").textContent = bytes(total);
  measured(byId("bytes"), groups.map(([name, size]) => [name, bytes(size), percent(size, total)]));
}

function showSpeed(stats, now) {
  const seconds = last ? (now - last.at) / 1000 : 0;
  const speed = seconds ? Math.max(0, stats.counts.new - last.tokens) / seconds : 0;
  last = { at: now, tokens: stats.counts.new };
  speeds.push(speed);
  if (speeds.length > SECONDS) speeds.shift();
  const top = Math.max(1, ...speeds);
  const points = speeds.map((value, at) => `${120 * (at + SECONDS - speeds.length) / (SECONDS - 1)},${32 - 28 * value / top}`);
  const start = 120 * (SECONDS - speeds.length) / (SECONDS - 1);
  byId("wave-path").setAttribute("d", `M${start},32 L${points.join(" L")} L120,32 Z`);
  byId("speed").textContent = speed ? speed.toFixed(1) : "0";
  byId("requests").textContent = `${stats.running}, ${stats.waiting}`;
  byId("written").textContent = number.format(stats.counts.new);
}

function showDrafts({ accepted, verifications }) {
  const rows = accepted.map((count, at) => [`draft ${at + 1}`, `${Math.round(percent(count, verifications))} %`, percent(count, verifications)]);
  measured(byId("drafts"), rows.length ? rows : [["none verified yet", "", 0]]);
}

function showLayers(layers) {
  const box = byId("layers");
  if (box.childElementCount || !layers) return;
  byId("layers-total").textContent = layers.length;
  for (const part of new Set(layers.map((layer) => layer.part))) {
    const list = make("ol");
    for (const { id, mode, ratio } of layers.filter((layer) => layer.part === part)) {
      const tile = make("li", mode, LETTERS[mode]);
      tile.title = `layer ${id}: ${mode}${ratio ? `, ${ratio} token${ratio > 1 ? "s" : ""} an entry` : ""}`;
      tile.setAttribute("aria-label", tile.title);
      list.append(tile);
    }
    box.append(make("h3", "", part), list);
  }
}

async function ask(headers) {
  const response = await fetch("/stats", { headers: headers() });
  if (response.status === 401) return "This server asks for an API key: see Settings";
  if (!response.ok) return "The engine does not run";
  const stats = await response.json();
  byId("model").textContent = stats.model ?? "";
  showPages(stats);
  showSpeed(stats, performance.now());
  showDrafts(stats.counts);
  showLayers(stats.layers);
  return "Live, once a second";
}

export function watch(headers) {
  const tick = async () => {
    if (asking || document.hidden) return;
    asking = true;
    let state = "The server does not answer";
    try {
      state = await ask(headers);
    } catch { /* it may come back: the next second asks again */ }
    asking = false;
    if (byId("state").textContent !== state) byId("state").textContent = state;
  };
  tick();
  setInterval(tick, 1000);
}

// What one answer cost. usage: of the API; null empties the figures. Seconds to the first token, and after it.
export function showTalk(usage, first = 0, rest = 0) {
  const count = (value) => (value === undefined ? "-" : number.format(value));
  byId("talk-prompt").textContent = count(usage?.prompt_tokens);
  byId("talk-hit").textContent = usage ? `${count(usage.prompt_cache_hit_tokens)} (${Math.round(percent(usage.prompt_cache_hit_tokens, usage.prompt_tokens))} %)` : "-";
  byId("talk-replay").textContent = count(usage?.prompt_cache_replayed_tokens);
  byId("talk-first").textContent = usage ? `${(1000 * first).toFixed(0)} ms` : "-";
  byId("talk-speed").textContent = usage && rest > 0 ? ((usage.completion_tokens - 1) / rest).toFixed(1) : "-";
}
