() => {
  // What an automated check can tell: names, labels, texts of images, unique ids, contrast of at least 4.5.
  const bad = [];
  const seen = (element) => element.getClientRects().length > 0;
  const all = (what) => [...document.querySelectorAll(what)].filter(seen);
  for (const image of all("img")) if (!image.alt) bad.push(`image without text: ${image.src}`);
  for (const input of all("input")) if (!input.labels.length) bad.push(`no label: ${input.id}`);
  for (const named of all("button, a")) {
    if (!named.textContent.trim() && !named.querySelector("img[alt]")) bad.push(`no name: ${named.outerHTML}`);
  }
  const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
  if (new Set(ids).size !== ids.length) bad.push("an id twice");
  if (!document.documentElement.lang || !document.title) bad.push("no language or title");

  const numbers = (text) => text.match(/[\d.]+/g).map(Number);
  const linear = (value) => (value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  const luminance = ([red, green, blue]) =>
    0.2126 * linear(red / 255) + 0.7152 * linear(green / 255) + 0.0722 * linear(blue / 255);
  const opacity = (colour) => (colour.length < 4 ? 1 : colour[3]);
  const behind = (element) => {
    const layers = [];
    for (let node = element; node; node = node.parentElement) {
      layers.unshift(numbers(getComputedStyle(node).backgroundColor));
      if (opacity(layers[0]) === 1) break;
    }
    const blend = (below, layer) => below.map((v, i) => v * (1 - opacity(layer)) + layer[i] * opacity(layer));
    return layers.reduce(blend, [255, 255, 255]);
  };
  const hasText = (element) => [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
  const shown = document.querySelector("dialog[open]") || document.body;
  for (const element of shown.querySelectorAll("*")) {
    if (!seen(element) || element.closest(".hidden") || !hasText(element)) continue;
    const values = [luminance(numbers(getComputedStyle(element).color)), luminance(behind(element))];
    const ratio = (Math.max(...values) + 0.05) / (Math.min(...values) + 0.05);
    if (ratio < 4.5) bad.push(`contrast ${ratio.toFixed(2)}: ${element.textContent.slice(0, 30)}`);
  }
  return bad;
}
