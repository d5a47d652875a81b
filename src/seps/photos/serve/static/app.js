// The page: its state is the address, and every change of the address is rendered here.
import { $, FILTERS, address, apiPath, ask, isQuery, keyOf, make, pagePath, plainClick, say, state, typing } from "./api.js";
import * as detail from "./detail.js";
import * as grid from "./grid.js";
import * as viewer from "./viewer.js";

const DEPTHS = [200, 1000, 5000]; // how many pictures are scored exactly, from one "Look further" to the next
const PAGES = 10; // loaded by scrolling before a button asks
let shown = { key: "", next: null, seen: new Set(), count: 0, pages: 0 };
let loading = null; // the page of results that is on its way
let status = { images: 0, explains: false };
let known = null; // the answer about the service, here or on its way
let turn = 0;

function go(url, { replace = false } = {}) {
  keepPlace();
  // The same address once more is no further step of the way back.
  if (replace || new URL(url, location).href === location.href) history.replaceState(history.state, "", url);
  else history.pushState({ within: true, place: history.state && history.state.place }, "", url);
  render();
}

// How far was scrolled and loaded, kept beside the address: loading the page again, or the way back, comes there again.
history.scrollRestoration = "manual";
let keeping = 0;

function keepPlace() {
  clearTimeout(keeping);
  keeping = 0;
  if (shown.key) history.replaceState({ ...history.state, place: { key: shown.key, count: shown.count, top: scrollY } }, "");
}

addEventListener("scroll", () => { keeping = keeping || setTimeout(keepPlace, 300); }, { passive: true });
addEventListener("pagehide", keepPlace);

async function render() {
  const mine = ++turn, now = state(), key = keyOf(now), current = () => mine === turn;
  fillForm(now);
  document.title = now.q ? `${now.q} - SEPS` : "SEPS: search pictures and see why";
  try {
    if (key !== shown.key && isQuery(now)) say("Searching..."); // at once: what stands there is about the last search
    await ready();
    if (!current()) return;
    if (key !== shown.key) {
      const place = history.state && history.state.place;
      const kept = place && place.key === key ? place : { count: 0, top: 0 };
      const answer = await ask(pagePath(now, 0, kept.count));
      if (!current()) return;
      begin(key, now, answer);
      while (shown.count < kept.count && shown.next !== null && await more());
      if (!current()) return;
      scrollTo(0, kept.top);
    }
    if (now.id) await detail.open(now, current, status.explains); else detail.shut();
  } catch (error) {
    if (!current()) return;
    detail.shut();
    if (key !== shown.key) {
      begin(key, now, null);
      shown.key = ""; // asked again as soon as somebody wants to see it
    }
    say(error.message);
  }
}

// The first page of other results than before.
function begin(key, now, answer) {
  shown = { key, next: null, seen: new Set(), count: 0, pages: 0 };
  clearTimeout(keeping);
  keeping = 0;
  loading = null;
  grid.clear();
  scrollTo(0, 0);
  $("results-title").textContent = isQuery(now) ? "Results" : now.sort === "oldest" ? "Oldest pictures" : "Newest pictures";
  $("results-title").classList.toggle("hidden", isQuery(now));
  $("start").hidden = isQuery(now) || !$("examples").children.length;
  add(answer || { results: [], next: null, total: 0 });
  say(answer ? counted(now, answer) : "");
  const depth = Number(now.depth) || DEPTHS[0];
  const cut = isQuery(now) && answer && answer.pictures >= depth && status.images > answer.pictures;
  $("end-note").textContent = cut ? `These are the ${answer.pictures} nearest of ${status.images} pictures.` : "";
  $("further").dataset.depth = DEPTHS.find((each) => each > depth) || "";
  $("further").hidden = !cut || !$("further").dataset.depth;
  watch();
}

function add(answer) {
  const fresh = answer.results.filter((hit) => !shown.seen.has(hit.id));
  fresh.forEach((hit) => shown.seen.add(hit.id));
  grid.append(fresh);
  shown.count += fresh.length;
  shown.next = answer.next;
  $("more").hidden = answer.next === null;
}

// Whether more results came.
async function more() {
  if (shown.next === null || loading) return false;
  const now = state(), key = shown.key, offset = shown.next;
  if (keyOf(now) !== key) return false;
  loading = ask(pagePath(now, offset));
  try {
    const answer = await loading;
    if (key !== shown.key || offset !== shown.next) return false;
    add(answer);
    loading = null;
    watch();
    return true;
  } catch (error) {
    if (key === shown.key) say(error.message);
    return false;
  } finally {
    loading = null;
  }
}

// Looks again whether the end of the results is near: the observer itself only tells of changes.
function watch() {
  observer.disconnect();
  observer.observe($("end"));
}

const observer = new IntersectionObserver((entries) => {
  // After some pages a button asks for more, so that the end of the page can be reached.
  if (entries.some((entry) => entry.isIntersecting) && ++shown.pages % PAGES) more();
}, { rootMargin: "400px" });

function counted(now, answer) {
  const { results, good, total, pictures, note } = answer;
  const filtered = FILTERS.some((name) => now[name]) ? " with these filters" : "";
  if (!results.length) return isQuery(now) ? `Nothing found${filtered}.` : `No pictures${filtered}.`;
  if (!isQuery(now)) return `${total} picture${total === 1 ? "" : "s"}.`;
  const order = { newest: "newest first", oldest: "oldest first" }[now.sort] || "best first";
  const folded = pictures - total ? `; ${pictures - total} folded` : "";
  const text = good === 0 ? `No good match; the ${pictures} nearest pictures, ${order}${folded}.`
    : `${pictures} pictures, ${order}${good === null ? "" : `; ${good} good`}${folded}.`;
  return note ? `${text} ${note}` : text;
}

function fillForm(now) {
  $("query").value = now.q;
  $("sort").value = now.sort;
  $("sort").options[0].hidden = !isQuery(now);
  if (!isQuery(now) && !now.sort) $("sort").value = "newest";
  $("fold").checked = now.fold !== "0";
  $("fold").closest("label").hidden = !isQuery(now);
  for (const name of FILTERS) $(name).value = now[name];
  const count = FILTERS.filter((name) => now[name]).length;
  $("filters-title").textContent = count ? `Filters (${count})` : "Filters";
  if (count) $("filters").open = true;
  $("clear").hidden = !count;
  const picture = now.upload ? apiPath("upload", now.upload) : now.like && apiPath("thumb", now.like);
  $("with").hidden = !picture;
  if (picture && $("with-picture").getAttribute("src") !== picture) $("with-picture").src = picture;
  $("weighing").hidden = !now.q;
  $("weight").value = now.weight || "0.5";
}

// What the form says, as changes of the address.
function asked() {
  const sort = $("sort").value;
  return {
    q: $("query").value.trim(),
    sort: sort === "newest" && !isQuery(state()) ? "" : sort,
    fold: $("fold").checked ? "" : "0",
    weight: $("weight").value === "0.5" ? "" : $("weight").value,
    ...Object.fromEntries(FILTERS.map((name) => [name, $(name).value.trim()])),
    depth: "", id: "",
  };
}

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const next = address({ ...asked(), sort: isQuery(state()) ? $("sort").value : "" });
  if (!($("query").value.trim() || state().like || state().upload)) { say("Write what to look for."); return; }
  // Also for the same words: the store may have changed, or the service may be back.
  shown.key = "";
  known = null;
  go(next);
});

for (const name of [...FILTERS, "sort", "fold", "weight"]) {
  $(name).addEventListener("change", () => {
    if (!$(name).checkValidity()) { $(name).reportValidity(); return; }
    go(address({ ...asked(), depth: state().depth }));
  });
}

$("clear").addEventListener("click", () => go(address(Object.fromEntries(FILTERS.map((name) => [name, ""])))));
$("without").addEventListener("click", () => go(address({ like: "", upload: "", weight: "", id: "" })));
$("further").addEventListener("click", () => go(address({ depth: $("further").dataset.depth })));
$("more").addEventListener("click", more);

async function send(file) {
  if (!file) return;
  say("Searching...");
  try {
    const { upload } = await ask("api/upload", { method: "POST", body: file });
    go(address({ q: $("query").value.trim(), like: "", upload, depth: "", id: "" }));
  } catch (error) {
    say(error.message);
  }
}

$("file").addEventListener("change", async () => {
  await send($("file").files[0]);
  $("file").value = "";
});
const pictureIn = (transfer) => [...(transfer ? transfer.files : [])].find((file) => file.type.startsWith("image/"));
addEventListener("dragover", (event) => event.preventDefault());
addEventListener("drop", (event) => { event.preventDefault(); send(pictureIn(event.dataTransfer)); });
addEventListener("paste", (event) => {
  const file = pictureIn(event.clipboardData);
  if (file) { event.preventDefault(); send(file); }
});

// Links of the page itself change the address without loading it again.
document.addEventListener("click", (event) => {
  const link = event.target.closest("a");
  const own = link && (link.closest("#results, #examples") || ["home", "similar", "combine"].includes(link.id));
  if (!own || !plainClick(event)) return;
  event.preventDefault();
  // A card belongs to what is asked now, also while its results are on their way.
  go(link.dataset.id ? address({ id: link.dataset.id }) : link.getAttribute("href"));
});

function leave() {
  if (!state().id) return;
  if (history.state && history.state.within) history.back(); else go(address({ id: "" }));
}

function beside(step) {
  const id = detail.neighbour(step);
  if (id) go(address({ id }), { replace: true });
  if (step > 0 && !detail.neighbour(2)) more();
}

const show = (changes) => go(address(changes), { replace: true });
const explaining = () => show({ plain: detail.detailed(state(), status.explains) ? "1" : "0" });
const marking = () => show({ kept: state().kept === "1" ? "" : "1" });

$("close").addEventListener("click", leave);
$("detail").addEventListener("cancel", (event) => { event.preventDefault(); leave(); });
$("previous").addEventListener("click", () => beside(-1));
$("following").addEventListener("click", () => beside(1));
$("details").addEventListener("click", explaining);
$("kept").addEventListener("change", marking);
$("larger").addEventListener("click", () => viewer.zoom(1.5));
$("smaller").addEventListener("click", () => viewer.zoom(1 / 1.5));
$("fit").addEventListener("click", viewer.fit);
viewer.onSwipe(beside);

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const arrow = event.key.startsWith("Arrow");
  if (detail.isOpen()) {
    if (arrow && event.shiftKey) viewer.pan(event.key);
    else if (event.key === "ArrowLeft") beside(-1);
    else if (event.key === "ArrowRight") beside(1);
    else if (event.key === "+" || event.key === "=") viewer.zoom(1.5);
    else if (event.key === "-") viewer.zoom(1 / 1.5);
    else if (event.key === "0") viewer.fit();
    else if (event.key === "e") explaining();
    else if (event.key === "k" && !$("switches").hidden) marking();
    else return;
    event.preventDefault();
  } else if (document.activeElement === $("query") && event.key === "ArrowDown") {
    if (grid.move(event.key)) event.preventDefault();
  } else if (typing()) {
    return;
  } else if (event.key === "/") {
    event.preventDefault();
    $("query").focus();
    $("query").select();
  } else if (event.key === "e") {
    const all = grid.links(), link = all.find((each) => each === document.activeElement) || all[0];
    if (link) { event.preventDefault(); go(address({ id: link.dataset.id })); }
  } else if (arrow && (document.activeElement === document.body || document.activeElement.closest("#results"))) {
    if (grid.move(event.key)) event.preventDefault();
  }
});

$("theme").value = document.documentElement.dataset.theme || "";
$("theme").addEventListener("change", () => {
  const theme = $("theme").value;
  if (theme) document.documentElement.dataset.theme = theme; else delete document.documentElement.dataset.theme;
  try {
    if (theme) localStorage.setItem("seps-theme", theme); else localStorage.removeItem("seps-theme");
  } catch { /* storage is switched off: the choice holds until the page is left */ }
});

// What the store holds: shown before the first query, and where filters are chosen.
async function look() {
  const found = await ask("api/overview");
  $("folders").replaceChildren(...found.folders.map(({ path, images }) => {
    const option = make("option", "", `${images} picture${images === 1 ? "" : "s"}`);
    option.value = path;
    return option;
  }));
  $("examples").replaceChildren(...found.examples.map((text) => {
    const link = make("a", "chip", text);
    link.href = `?q=${encodeURIComponent(text)}`;
    return link;
  }));
  $("start").hidden = isQuery(state()) || !found.examples.length;
}

// The service, asked once, and again after it did not answer or a search was sent.
function ready() {
  known = known || ask("api/status").then((found) => {
    status = found;
    grid.setKeeps(found.keeps);
    $("about").textContent = `${found.images} pictures of ${found.folder}, model ${found.model}.`;
  }).catch((error) => {
    known = null;
    throw error;
  });
  return known;
}

addEventListener("popstate", render);
look().catch(() => {}); // without it there is still a search
render();
