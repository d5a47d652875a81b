// The grid of results: cards, the line behind good matches, folded near-duplicates, kept patches on hover.
import { $, address, apiPath, cells, dayOf, isQuery, keptPatches, make, nameOf, shortName, state, veil } from "./api.js";

const HOVER = 150; // milliseconds before kept patches are asked for
let keeps = false; // whether the model selects patches
let lined = null; // the last card that was a good match or not
let numbered = 0; // cards so far, folded ones not among them

export const setKeeps = (value) => { keeps = value; };
export const isKeeping = () => keeps;
export const links = () => [...$("results").querySelectorAll("a")];

export function clear() {
  lined = null;
  numbered = 0;
  $("results").replaceChildren();
}

// Good matches come first; the rest begins behind a line.
export function append(results) {
  const items = [];
  for (const hit of results) {
    if (lined === true && hit.good === false) items.push(make("li", "line", "The rest: weaker matches"));
    lined = hit.good;
    const item = card(hit, ++numbered);
    items.push(item);
    if (hit.folded && hit.folded.length) item.append(folding(item, hit.folded));
  }
  $("results").append(...items);
}

// `number` is the place among the results, where their order is that of their scores.
function card(hit, number = 0) {
  const item = make("li"), link = make("a"), frame = make("div", "frame"), image = make("img"), facts = make("div", "facts");
  link.href = address({ id: hit.id, plain: "", kept: "" });
  link.dataset.id = hit.id;
  link.title = nameOf(hit);
  image.src = apiPath("thumb", hit.id);
  image.alt = nameOf(hit);
  image.loading = "lazy";
  frame.append(image);
  const now = state(), scored = isQuery(now) && !now.sort;
  facts.append(make("span", "name", scored && number ? `${number}. ${shortName(hit)}` : shortName(hit)));
  facts.append(make("span", scored ? "score" : "day", scored ? hit.score.toFixed(2) : hit.date ? dayOf(hit) : ""));
  if (typeof hit.confidence === "number") link.title += `, confidence ${hit.confidence.toFixed(2)}`;
  link.append(frame, facts);
  hovering(link, frame, hit);
  item.append(link);
  return item;
}

function folding(item, folded) {
  const button = make("button", "folding", `${folded.length} more like this`);
  let inner = null;
  button.type = "button";
  button.setAttribute("aria-expanded", "false");
  button.addEventListener("click", () => {
    if (inner) {
      inner.forEach((each) => each.remove());
      inner = null;
    } else {
      inner = folded.map((hit) => { const each = card(hit); each.classList.add("folded"); return each; });
      item.after(...inner);
    }
    button.setAttribute("aria-expanded", String(Boolean(inner)));
    button.textContent = inner ? "Fold again" : `${folded.length} more like this`;
  });
  return button;
}

// What the sentence kept of a picture, while the pointer or the keyboard is on it.
function hovering(link, frame, hit) {
  let timer = 0, canvas = null;
  const show = () => {
    const { q } = state();
    if (!q || !keeps || canvas) return;
    clearTimeout(timer);
    timer = setTimeout(async () => {
      const mine = timer, found = await keptPatches(hit.id, q);
      if (!found || mine !== timer || canvas) return;
      canvas = make("canvas");
      canvas.setAttribute("aria-hidden", "true");
      const scale = 320 / Math.max(hit.width, hit.height);
      canvas.width = Math.max(1, Math.round(hit.width * scale));
      canvas.height = Math.max(1, Math.round(hit.height * scale));
      const colour = veil();
      cells(canvas.getContext("2d"), found.grid, [canvas.width, canvas.height],
        (place) => (found.kept[place] === "1" ? null : colour));
      if (found.note) link.title = found.note;
      frame.append(canvas);
    }, HOVER);
  };
  const hide = () => {
    clearTimeout(timer);
    timer = 0;
    if (canvas) canvas.remove();
    canvas = null;
  };
  link.addEventListener("pointerenter", (event) => { if (event.pointerType === "mouse") show(); });
  link.addEventListener("pointerleave", hide);
  link.addEventListener("focus", show);
  link.addEventListener("blur", hide);
}

// Arrow keys: over the cards, by rows and columns as they lie.
export function move(key) {
  const all = links(), here = all.indexOf(document.activeElement);
  if (!all.length) return false;
  if (here < 0) { all[0].focus(); return true; }
  const step = { ArrowRight: 1, ArrowLeft: -1 }[key];
  if (step) {
    const next = all[here + step];
    if (next) next.focus();
    return true;
  }
  const from = all[here].getBoundingClientRect(), down = key === "ArrowDown";
  let best = null, distance = Infinity;
  for (const link of all) {
    const box = link.getBoundingClientRect();
    if (down ? box.top <= from.top + 4 : box.top >= from.top - 4) continue;
    const away = Math.abs(box.top - from.top) * 10 + Math.abs(box.left - from.left);
    if (away < distance) { distance = away; best = link; }
  }
  if (best) best.focus(); else if (!down) $("query").focus();
  return true;
}
