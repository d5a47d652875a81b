"use strict";
// State lives in the address: ?q=SENTENCE, ?like=ID or ?upload=NAME, and &id=ID while a picture is open.
const $ = (name) => document.getElementById(name);
const uploads = new Map(); // results of uploaded pictures, which no address can hold
let shown = { key: "", results: [] };
let explanation = null;
let pressed = null; // the word that stays lit
let turn = 0;

async function ask(path, options) {
  const response = await fetch(path, options);
  const answer = await response.json().catch(() => ({ error: `The service answered ${response.status}.` }));
  if (!response.ok) throw new Error(answer.error || `The service answered ${response.status}.`);
  return answer;
}

function address(changes) {
  const params = new URLSearchParams(location.search);
  for (const [name, value] of Object.entries(changes)) {
    if (value === null) params.delete(name); else params.set(name, value);
  }
  const text = params.toString();
  return text ? `/?${text}` : "/";
}

function go(url) {
  history.pushState({ within: true }, "", url);
  render();
}

const say = (text) => { $("message").textContent = text; };
const nameOf = (hit) => (hit.member ? `${hit.path}: ${hit.member}` : hit.path);

async function render() {
  const mine = ++turn;
  const params = new URLSearchParams(location.search);
  const q = params.get("q"), like = params.get("like"), upload = params.get("upload"), id = params.get("id");
  $("query").value = q || "";
  document.title = q ? `${q} - SEPS` : "SEPS: search pictures and see why";
  const key = JSON.stringify([q, like, upload]);
  try {
    if (key !== shown.key) {
      let results = [], good = null;
      if (q || like) {
        say("Searching...");
        const path = q ? `/api/search?q=${encodeURIComponent(q)}` : `/api/similar/${encodeURIComponent(like)}`;
        ({ results, good } = await ask(path));
      } else if (upload && uploads.has(upload)) {
        results = uploads.get(upload);
      }
      if (mine !== turn) return;
      shown = { key, results };
      list(results, good);
      if (upload && !uploads.has(upload)) say("Choose the picture again: uploads are not kept.");
      else if (q || like || upload) say(counted(results, good));
      else say("");
    }
    if (id) await open(id, q, mine); else shut();
  } catch (error) {
    if (mine === turn) { shut(); say(error.message); if (key !== shown.key) { shown = { key, results: [] }; list([], null); } }
  }
}

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

function counted(results, good) {
  if (!results.length) return "Nothing found.";
  if (good === 0) return `No good match; the ${results.length} nearest pictures.`;
  return `${results.length} pictures, best first${good === null ? "" : `; ${good} good`}.`;
}

// Good matches first; the rest begins behind a line.
function list(results, good) {
  const items = results.map((hit) => {
    const item = make("li"), link = make("a"), image = make("img"), facts = make("div", "facts");
    link.href = address({ id: hit.id });
    link.dataset.id = hit.id;
    image.src = hit.thumbnail;
    image.alt = nameOf(hit);
    image.loading = "lazy";
    facts.append(make("span", "name", `${hit.rank}. ${nameOf(hit)}`), make("span", "score", hit.score.toFixed(2)));
    link.append(image, facts);
    item.append(link);
    if (typeof hit.confidence === "number") link.title = `Confidence ${hit.confidence.toFixed(2)}`;
    return item;
  });
  if (good > 0 && good < items.length) items.splice(good, 0, make("li", "line", "The rest: weaker matches"));
  $("results").replaceChildren(...items);
}

async function open(id, q, mine) {
  const facts = await ask(`/api/picture/${encodeURIComponent(id)}`);
  if (mine !== turn) return;
  explanation = null;
  pressed = null;
  $("detail-title").textContent = nameOf(facts);
  $("photo-note").textContent = facts.note;
  const photo = $("photo");
  photo.alt = nameOf(facts);
  photo.dataset.id = id;
  photo.src = facts.original === "missing" ? facts.thumbnail : `/api/image/${encodeURIComponent(id)}`;
  fit(facts);
  $("similar").href = `/?like=${encodeURIComponent(id)}`;
  $("why").hidden = !q;
  $("kept").disabled = !q;
  $("caption-note").textContent = "";
  $("words").replaceChildren();
  paint();
  if (!$("detail").open) $("detail").showModal();
  if (!q) return;
  const found = await ask(`/api/explain/${encodeURIComponent(id)}?q=${encodeURIComponent(q)}`);
  if (mine !== turn) return;
  explanation = found;
  $("detail-title").textContent = `${nameOf(found)}, score ${found.score.toFixed(3)}`;
  words(found);
  terms(found);
  describe(found);
  paint();
}

// Where the file turns out to be no picture any more, the service says so and where the thumbnail is.
async function unshown() {
  const photo = $("photo"), id = photo.dataset.id;
  if (!photo.src.includes("/api/image/")) return;
  const response = await fetch(photo.src);
  const answer = await response.json().catch(() => ({}));
  if (photo.dataset.id !== id) return;
  $("photo-note").textContent = answer.error || `The service answered ${response.status}.`;
  if (answer.thumbnail) photo.src = answer.thumbnail;
}

// Small photos are enlarged to the room there is, so that patches can be told apart.
function fit(facts) {
  const part = matchMedia("(max-width: 760px)").matches ? 46 : 66;
  if (facts) $("stage").style.width = `min(100%, ${part}dvh * ${facts.width / facts.height})`;
}

function shut() {
  if ($("detail").open) $("detail").close();
}

function words(found) {
  const largest = Math.max(...found.words.map((part) => Math.abs(part.contribution)), 1e-9);
  $("words").replaceChildren(...found.words.map((part, index) => {
    const button = make("button");
    button.type = "button";
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
  const part = index === null ? null : explanation.words[index];
  $("caption-note").textContent = part ? `"${part.word}" adds ${part.contribution.toFixed(3)} to the score.` : "";
}

const termNames = {
  patch_alignment: "Patches, word by word", patch_pooled: "Patches, mean",
  description_alignment: "Description, word by word", description_pooled: "Description, mean",
  lexical: "Rare words found in the description",
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
  const largest = Math.max(...found.description.map((part) => part.contribution), 1e-9);
  const parts = [];
  for (const part of found.description.filter((each) => !each.special)) {
    if (parts.length && !/^[.,;:!?)\]'"]/.test(part.word)) parts.push(" ");
    const span = make("span", "", part.word);
    span.style.backgroundColor = `rgba(var(--mark), ${Math.max(0, part.contribution / largest).toFixed(2)})`;
    span.title = part.contribution.toFixed(3);
    parts.push(span);
  }
  $("description").replaceChildren(...parts);
}

// One small picture with a pixel a patch, stretched over the photo.
function paint(index = pressed) {
  const canvas = $("heat");
  const context = canvas.getContext("2d");
  canvas.dataset.mode = "none";
  context.clearRect(0, 0, canvas.width, canvas.height);
  if (!explanation) return;
  const [rows, columns] = explanation.grid;
  const keeping = $("kept").checked;
  const heat = index === null ? null : explanation.words[index].heat;
  canvas.width = columns * 32;
  canvas.height = rows * 32;
  if (keeping) cells(context, rows, columns, (place) => (explanation.kept[place] ? null : "rgba(255,255,255,0.8)"));
  if (heat) warm(context, rows, columns, heat);
  canvas.dataset.mode = [keeping && "kept", heat && `word-${index}`].filter(Boolean).join(" ") || "none";
}

function cells(context, rows, columns, colour) {
  for (let place = 0; place < rows * columns; place++) {
    const fill = colour(place);
    if (!fill) continue;
    context.fillStyle = fill;
    context.fillRect((place % columns) * 32, Math.floor(place / columns) * 32, 32, 32);
  }
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

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const q = $("query").value.trim();
  if (q) go(`/?q=${encodeURIComponent(q)}`); else say("Write what to look for.");
});

$("file").addEventListener("change", async () => {
  const file = $("file").files[0];
  if (!file) return;
  say("Searching...");
  try {
    const answer = await ask("/api/search-image", { method: "POST", body: file });
    const name = `${file.name} ${uploads.size + 1}`;
    uploads.set(name, answer.results);
    go(`/?upload=${encodeURIComponent(name)}`);
  } catch (error) {
    say(error.message);
  }
  $("file").value = "";
});

$("results").addEventListener("click", (event) => {
  const link = event.target.closest("a");
  if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  go(link.getAttribute("href"));
});

$("results").addEventListener("keydown", (event) => {
  const links = [...$("results").querySelectorAll("a")], here = links.indexOf(document.activeElement);
  if (here < 0) return;
  const across = links.filter((link) => link.offsetTop === links[0].offsetTop).length;
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: across, ArrowUp: -across }[event.key];
  if (!step) return;
  event.preventDefault();
  links[Math.min(links.length - 1, Math.max(0, here + step))].focus();
});

$("similar").addEventListener("click", (event) => {
  if (event.ctrlKey || event.metaKey || event.shiftKey) return;
  event.preventDefault();
  go($("similar").getAttribute("href"));
});

function leave() {
  const id = new URLSearchParams(location.search).get("id");
  if (!id) return;
  if (history.state && history.state.within) history.back(); else go(address({ id: null }));
  const link = $("results").querySelector(`a[data-id="${id}"]`);
  if (link) link.focus();
}

$("close").addEventListener("click", leave);
$("detail").addEventListener("cancel", (event) => { event.preventDefault(); leave(); });
$("detail").addEventListener("click", (event) => { if (event.target === $("detail")) leave(); });
$("kept").addEventListener("change", () => paint());
$("photo").addEventListener("load", () => paint());
$("photo").addEventListener("error", unshown);
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && !$("detail").open && document.activeElement.tagName !== "INPUT") {
    event.preventDefault();
    $("query").focus();
  }
});
addEventListener("popstate", render);

ask("/api/status").then((status) => {
  $("about").textContent = `${status.images} pictures of ${status.folder}, model ${status.model}.`;
}, (error) => say(error.message));
render();
