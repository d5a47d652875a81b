// One picture: the photo, its path, and what its score is made of.
import { $, address, apiPath, ask, cells, dayOf, make, nameOf, state, veil } from "./api.js";
import { isKeeping, links } from "./grid.js";
import * as viewer from "./viewer.js";

let explanation = null;
let pressed = null; // the word that stays lit
let opened = ""; // the id that is shown, and whether it was explained

export const isOpen = () => $("detail").open;

export async function open(now, current, explains) {
  const { id, q } = now;
  const key = JSON.stringify([id, q]);
  if (key !== opened || !isOpen()) {
    const facts = await ask(apiPath("picture", id));
    if (!current()) return;
    explanation = null;
    pressed = null;
    opened = key;
    fill(id, q, facts);
    $("words").replaceChildren();
    $("terms").tBodies[0].replaceChildren();
    $("described").hidden = $("written").hidden = true;
  }
  view(now, explains);
  if (!isOpen()) $("detail").showModal();
  if (!q || !explains || explanation) return;
  const found = await ask(`${apiPath("explain", id)}?q=${encodeURIComponent(q)}`);
  if (!current()) return;
  explanation = found;
  // Of a sum the first sentence that is looked for is explained.
  const whose = found.caption !== q.trim() ? `score of "${found.caption}"` : now.like || now.upload ? "score of the words" : "score";
  $("detail-title").textContent = `${nameOf(found)}, ${whose} ${found.score.toFixed(3)}`;
  words(found);
  terms(found);
  describe(found);
  paint();
}

function fill(id, q, facts) {
  const photo = $("photo");
  $("detail-title").textContent = nameOf(facts);
  $("photo-note").textContent = facts.note;
  $("full-path").textContent = facts.full_path;
  $("facts").textContent = `${facts.width} × ${facts.height} pixels${facts.date ? `, ${dayOf(facts, 19)}` : ""}`;
  photo.alt = nameOf(facts);
  photo.dataset.id = id;
  // Under a heat map is the picture that was indexed: its file while that is unchanged, else the store's thumbnail.
  const indexed = facts.original === "present";
  photo.src = apiPath(indexed ? "image" : "thumb", id);
  viewer.begin(facts, indexed ? `${apiPath("image", id)}?large=true` : "");
  $("similar").href = address({ q: "", upload: "", like: id, id: "" });
  $("combine").href = address({ upload: "", like: id, id: "" });
  // A search by the picture needs the file as it was indexed, opening and saving the file as it is.
  const missing = facts.original === "missing";
  $("similar").hidden = !indexed;
  $("combine").hidden = !indexed || !q;
  $("open").href = apiPath("original", id);
  $("download").href = `${apiPath("original", id)}?download=true`;
  $("open").hidden = $("download").hidden = missing;
}

// Whether the details stand beside the picture: they do where it is explained, unless the address says otherwise.
export const detailed = (now, explains) => (now.plain ? now.plain === "0" : Boolean(now.q) && explains);

// The parts of the state that change how an open picture is shown.
function view(now, explains) {
  const possible = Boolean(now.q) && explains;
  $("why").hidden = !possible;
  $("side").hidden = !detailed(now, explains);
  $("detail").classList.toggle("plain", $("side").hidden);
  $("details").setAttribute("aria-expanded", String(!$("side").hidden));
  $("switches").hidden = !possible || !isKeeping();
  $("kept").checked = isKeeping() && now.kept === "1";
  $("caption-note").textContent = "";
  if (($("why").hidden || $("side").hidden) && pressed !== null) press(pressed);
  const all = links(), here = all.findIndex((link) => link.dataset.id === now.id);
  $("previous").disabled = here <= 0;
  $("following").disabled = here < 0 || here === all.length - 1;
  paint();
}

export function shut() {
  if (!isOpen()) return;
  const id = $("photo").dataset.id;
  $("detail").close();
  const link = links().find((each) => each.dataset.id === id);
  if (link) link.focus();
}

// The id of the picture before (-1) or behind (1) the open one.
export function neighbour(step) {
  const all = links(), here = all.findIndex((link) => link.dataset.id === state().id);
  const next = here < 0 ? null : all[here + step];
  return next ? next.dataset.id : null;
}

// Where the file turns out to be another or no picture any more, the service says so and where the thumbnail is.
async function unshown() {
  const photo = $("photo"), id = photo.dataset.id;
  if (!photo.src.includes("/api/image/")) return;
  const response = await fetch(photo.src);
  const answer = await response.json().catch(() => ({}));
  if (photo.dataset.id !== id) return;
  $("photo-note").textContent = answer.error || `The service answered ${response.status}.`;
  photo.src = apiPath("thumb", id);
}

// The words that a picture can show, and the others ("the", "of", marks) as one: the encoder writes the meaning of a
// sentence into all its words, so that those would lead a list for people.
function shownWords(all) {
  const named = all.filter((part) => !part.stop), others = all.filter((part) => part.stop);
  if (!named.length || !others.length) return all;
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  return [...named, {
    word: "others", special: true, title: others.map((part) => `${part.word} ${part.contribution.toFixed(3)}`).join(", "),
    contribution: sum(others.map((part) => part.contribution)),
    heat: others[0].heat.map((_, place) => sum(others.map((part) => part.heat[place]))),
  }];
}

function words(found) {
  found.shown = shownWords(found.words);
  const largest = Math.max(...found.shown.map((part) => Math.abs(part.contribution)), 1e-9);
  $("words").replaceChildren(...found.shown.map((part, index) => {
    const button = make("button");
    button.type = "button";
    if (part.title) button.title = part.title;
    button.setAttribute("aria-pressed", "false");
    const track = make("span", "track"), fill = make("span", "fill");
    fill.style.width = `${Math.max(0, 100 * part.contribution / largest)}%`;
    track.append(fill);
    button.append(make("span", part.special ? "word special" : "word", part.word), track,
      make("span", "number", part.contribution.toFixed(3)));
    for (const event of ["mouseenter", "focus"]) button.addEventListener(event, () => light(index));
    for (const event of ["mouseleave", "blur"]) button.addEventListener(event, () => light(pressed));
    button.addEventListener("click", () => press(index));
    return button;
  }));
}

function press(index) {
  pressed = pressed === index ? null : index;
  [...$("words").children].forEach((button, place) => button.setAttribute("aria-pressed", String(place === pressed)));
  light(pressed);
}

function light(index) {
  paint(index);
  if (!explanation) return;
  const part = index === null ? null : explanation.shown[index];
  const name = part && part.title ? "The other words add" : part && `"${part.word}" adds`;
  $("caption-note").textContent = part ? `${name} ${part.contribution.toFixed(3)} to the score.` : "";
}

const termNames = {
  patch_alignment: "Patches, word by word", patch_pooled: "Patches, mean",
  description_alignment: "Description, word by word", description_pooled: "Description, mean",
  lexical: "Rare words found in the texts",
  background: "For any sentence",
};

function terms(found) {
  const rows = [...Object.entries(found.terms).map(([name, value]) => [termNames[name] || name, value]),
    ["Score", found.score]];
  $("terms").tBodies[0].replaceChildren(...rows.map(([name, value]) => {
    const row = make("tr"), head = make("th", "", name);
    head.scope = "row";
    row.append(head, make("td", "", value.toFixed(3)));
    return row;
  }));
}

function describe(found) {
  $("described").hidden = !found.description.length;
  const largest = Math.max(...found.description.filter((part) => !part.stop).map((part) => part.contribution), 1e-9);
  const parts = [];
  for (const part of found.description.filter((each) => !each.special)) {
    if (parts.length && !/^[.,;:!?)\]'"]/.test(part.word)) parts.push(" ");
    const span = make("span", "", part.word);
    // A function word is part of the text and of the score (its title says how much), but is not marked.
    const mark = part.stop ? 0 : Math.max(0, part.contribution / largest);
    span.style.backgroundColor = `rgba(var(--mark), ${mark.toFixed(2)})`;
    span.title = part.contribution.toFixed(3);
    parts.push(span);
  }
  $("description").replaceChildren(...parts);
  $("written").hidden = !found.text_in_picture;
  $("written-text").textContent = found.text_in_picture.replaceAll("\n", " / ");
  const written = found.words_in_picture;
  $("written-words").textContent = written.length ? `Words of the sentence: ${written.join(", ")}.` : "";
  $("sources").textContent = found.described_by.length ? `From: ${found.described_by.join(", ")}.` : "";
}

// One small picture with a pixel per patch, stretched over the photo.
export function paint(index = pressed) {
  const canvas = $("heat");
  const context = canvas.getContext("2d");
  canvas.dataset.mode = "none";
  context.clearRect(0, 0, canvas.width, canvas.height);
  if (!explanation) return;
  const [rows, columns] = explanation.grid;
  const keeping = $("kept").checked;
  const heat = index === null ? null : explanation.shown[index].heat;
  canvas.width = columns * 32;
  canvas.height = rows * 32;
  const colour = veil();
  if (keeping) {
    cells(context, explanation.grid, [canvas.width, canvas.height], (place) => (explanation.kept[place] ? null : colour));
  }
  if (heat) warm(context, rows, columns, heat);
  canvas.dataset.mode = [keeping && "kept", heat && `word-${index}`].filter(Boolean).join(" ") || "none";
}

function warm(context, rows, columns, heat) {
  const small = document.createElement("canvas");
  small.width = columns;
  small.height = rows;
  const pen = small.getContext("2d"), image = pen.createImageData(columns, rows);
  const largest = Math.max(...heat.map(Math.abs), 1e-9);
  heat.forEach((value, place) => {
    const [red, green, blue] = value >= 0 ? [255, 70, 0] : [30, 110, 255];
    image.data.set([red, green, blue, 200 * Math.abs(value) / largest], place * 4);
  });
  pen.putImageData(image, 0, 0);
  context.imageSmoothingEnabled = true;
  context.imageSmoothingQuality = "high";
  context.drawImage(small, 0, 0, columns * 32, rows * 32);
}

async function copy() {
  try {
    await navigator.clipboard.writeText($("full-path").textContent);
    $("copy").textContent = "Copied";
  } catch { // not allowed here: select it, so that one key copies it
    getSelection().selectAllChildren($("full-path"));
    $("copy").textContent = "Selected";
  }
  setTimeout(() => { $("copy").textContent = "Copy path"; }, 1500);
}

$("photo").addEventListener("load", () => paint());
$("photo").addEventListener("error", unshown);
$("copy").addEventListener("click", copy);
