// The open picture in its window: zoom by wheel, keys, buttons, double click or two fingers; dragging moves it.
import { $ } from "./api.js";

const MOST = 16; // times the size that fits the window
const SHARP = 1600; // pixels of the picture that the service sends first
let scale = 1, x = 0, y = 0;
let larger = ""; // where the picture has more pixels, until they were loaded
let swiped = () => {};
const pointers = new Map(); // where each finger, or the mouse, is
let start = null; // where a swipe began

export const onSwipe = (work) => { swiped = work; };

// Another picture: it fits the window. `large` is where it has more pixels, if it has any.
export function begin(facts, large) {
  larger = Math.max(facts.width, facts.height) > SHARP ? large : "";
  $("stage").style.setProperty("--ratio", facts.width / facts.height);
  fit();
}

export function fit() {
  [scale, x, y] = [1, 0, 0];
  draw();
}

// Zoom around a point, counted from the middle of the window.
export function zoom(factor, at = { x: 0, y: 0 }) {
  const next = Math.min(MOST, Math.max(1, scale * factor)), part = next / scale;
  [x, y, scale] = [at.x - (at.x - x) * part, at.y - (at.y - y) * part, next];
  draw();
  if (scale > 1) sharpen();
}

export function pan(key) {
  const [right, down] = { ArrowLeft: [1, 0], ArrowRight: [-1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] }[key];
  move(right * 80, down * 80);
}

function move(right, down) {
  x += right;
  y += down;
  draw();
}

function draw() {
  const view = $("view"), stage = $("stage");
  const within = (value, size, room) => {
    const most = Math.max(0, (size * scale - room) / 2);
    return Math.min(most, Math.max(-most, value));
  };
  x = within(x, stage.offsetWidth, view.clientWidth);
  y = within(y, stage.offsetHeight, view.clientHeight);
  stage.style.transform = scale === 1 ? "" : `translate(${x}px, ${y}px) scale(${scale})`;
  view.classList.toggle("zoomed", scale > 1);
  $("fit").textContent = `${Math.round(100 * scale)} %`;
  $("smaller").disabled = scale === 1;
  $("larger").disabled = scale === MOST;
}

// The picture with more pixels takes the place of the one that is there, once it has come.
function sharpen() {
  if (!larger) return;
  const photo = $("photo"), before = photo.src, image = new Image();
  image.addEventListener("load", () => { if (photo.src === before) photo.src = image.src; });
  image.src = larger;
  larger = "";
}

function fromMiddle(event) {
  const box = $("view").getBoundingClientRect();
  return { x: event.clientX - box.left - box.width / 2, y: event.clientY - box.top - box.height / 2 };
}

const between = ([one, two]) => Math.hypot(one.x - two.x, one.y - two.y);

$("view").addEventListener("wheel", (event) => {
  event.preventDefault();
  zoom(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.002)), fromMiddle(event));
}, { passive: false });

$("view").addEventListener("dblclick", (event) => {
  if (scale > 1) fit(); else zoom(3, fromMiddle(event));
});

$("view").addEventListener("pointerdown", (event) => {
  if (event.button) return;
  pointers.set(event.pointerId, fromMiddle(event));
  start = pointers.size === 1 && event.pointerType === "touch" && scale === 1 ? fromMiddle(event) : null;
  $("view").setPointerCapture(event.pointerId);
});

$("view").addEventListener("pointermove", (event) => {
  const before = pointers.get(event.pointerId);
  if (!before) return;
  const here = fromMiddle(event);
  if (pointers.size === 2) {
    const distance = between([...pointers.values()]);
    pointers.set(event.pointerId, here);
    zoom(between([...pointers.values()]) / Math.max(distance, 1), here);
  } else {
    pointers.set(event.pointerId, here);
    if (scale > 1) move(here.x - before.x, here.y - before.y);
  }
});

for (const kind of ["pointerup", "pointercancel"]) {
  $("view").addEventListener(kind, (event) => {
    const here = pointers.get(event.pointerId);
    pointers.delete(event.pointerId);
    if (here && start && kind === "pointerup" && Math.abs(here.x - start.x) > 60 && Math.abs(here.y - start.y) < 60) {
      swiped(here.x < start.x ? 1 : -1);
    }
    start = null;
  });
}

addEventListener("resize", draw);
