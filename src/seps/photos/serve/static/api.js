// What the other files share: the service, the address bar, and small elements.
export const $ = (name) => document.getElementById(name);

export async function ask(path, options) {
  const response = await fetch(path, options).catch(() => {
    throw new Error("The service does not answer. Start it again (seps serve), then search again.");
  });
  const answer = await response.json().catch(() => ({ error: `The service answered ${response.status}.` }));
  if (!response.ok) throw new Error(answer.error || `The service answered ${response.status}.`);
  return answer;
}

// The filters: the names of fields of the form, of parts of the address, and of parameters of the service.
export const FILTERS = ["folder", "since", "until", "min_size", "near", "within"];
// The whole state of the page is its address. The first group says what is searched for, the second how it is shown.
const ASKED = ["q", "like", "upload", "weight", ...FILTERS, "sort", "depth", "fold"];
const SHOWN = ["id", "plain", "kept"];

export function state() {
  const params = new URLSearchParams(location.search);
  return Object.fromEntries([...ASKED, ...SHOWN].map((name) => [name, params.get(name) || ""]));
}

// The address of the present state with some of it changed; an empty value takes a part away.
export function address(changes) {
  const next = { ...state(), ...changes };
  if (!next.q || !(next.like || next.upload)) next.weight = "";
  if (!next.id) next.plain = next.kept = "";
  const parts = [...ASKED, ...SHOWN].filter((name) => next[name]);
  return parts.length ? `?${parts.map((name) => `${name}=${encodeURIComponent(next[name])}`).join("&")}` : "./";
}

// What is asked for and in which order: results of the same key are the same.
export const keyOf = (now) => JSON.stringify(ASKED.map((name) => now[name]));

export const isQuery = (now) => Boolean(now.q || now.like || now.upload);

const PAGE = 24, MOST = 192;

// Addresses of the service: relative to that of the page, which may lie below a prefix.
export const apiPath = (kind, id) => `api/${kind}/${encodeURIComponent(id)}`;

// The path of one page of results, of at least `count` of them as far as the service gives so many at once.
export function pagePath(now, offset, count = PAGE) {
  const params = new URLSearchParams({ k: Math.min(MOST, Math.ceil(Math.max(count, 1) / PAGE) * PAGE), offset });
  for (const name of FILTERS) if (now[name]) params.set(name, now[name]);
  if (!isQuery(now)) {
    if (now.sort) params.set("sort", now.sort);
    return `api/pictures?${params}`;
  }
  for (const name of ["q", "like", "upload", "weight", "sort"]) if (now[name]) params.set(name, now[name]);
  if (now.depth) params.set("candidates", now.depth);
  params.set("fold", now.fold !== "0");
  return `api/search?${params}`;
}

// Which patches a sentence keeps of a picture, asked for once.
const kept = new Map();

export function keptPatches(id, q) {
  const key = `${id} ${q}`;
  if (!kept.has(key)) {
    if (kept.size >= 500) kept.delete(kept.keys().next().value);
    kept.set(key, ask(`${apiPath("kept", id)}?q=${encodeURIComponent(q)}`).catch(() => {
      kept.delete(key);
      return null;
    }));
  }
  return kept.get(key);
}

export function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

export const say = (text) => { $("message").textContent = text; };
export const nameOf = (hit) => (hit.member ? `${hit.path}: ${hit.member}` : hit.path);
// The day of a picture. That of a file is not that of the photo: copying or editing it makes a new one.
export const dayOf = (hit, digits = 10) => `${hit.date_source === "exif" ? "" : "file date "}${hit.date.slice(0, digits).replace("T", " ")}`;
export const shortName = (hit) => (hit.member || hit.path).split("/").pop();
export const plainClick = (event) => !(event.ctrlKey || event.metaKey || event.shiftKey || event.button);
export const typing = () => document.activeElement.matches("input:not([type=checkbox]), select, textarea");

export function cells(context, grid, size, colour) {
  const [rows, columns] = grid;
  for (let place = 0; place < rows * columns; place++) {
    const fill = colour(place);
    if (!fill) continue;
    context.fillStyle = fill;
    const left = Math.round((place % columns) * size[0] / columns), top = Math.round(Math.floor(place / columns) * size[1] / rows);
    const right = Math.round((place % columns + 1) * size[0] / columns);
    const bottom = Math.round((Math.floor(place / columns) + 1) * size[1] / rows);
    context.fillRect(left, top, right - left, bottom - top);
  }
}

export const veil = () => getComputedStyle(document.documentElement).getPropertyValue("--veil");
