// Search PNG pictures by a sentence: node search.mjs "a dog" a.png b.png   Check this installation: node search.mjs
// Needs: npm install (see package.json)
import { readFileSync } from "node:fs";
import { InferenceSession, Tensor } from "onnxruntime-web";
import { Tokenizer } from "@huggingface/tokenizers";
import { PNG } from "pngjs";

const read = (name) => JSON.parse(readFileSync(new URL(name, import.meta.url)));
const { width, height } = read("preprocessing.json").resize[1];
const tokenizer = new Tokenizer(read("tokenizer.json"), read("tokenizer_config.json"));
const open = (name) => InferenceSession.create(new URL(name, import.meta.url).pathname);
const [images, texts] = await Promise.all([open("image.onnx"), open("text.onnx")]);

async function textVector(text) {
  const { ids } = tokenizer.encode(text);
  const shape = [1, ids.length];
  const mask = new Tensor("bool", new Uint8Array(ids.length).fill(1), shape);
  return (await texts.run({ ids: new Tensor("int64", BigInt64Array.from(ids, BigInt), shape), mask })).vector.data;
}

// Stretches to the model's size by the mean of the pixels that fall into each new one (or the nearest one).
function pixelsOf(png) {
  const out = new Float32Array(3 * height * width);
  for (let y = 0; y < height; y++) for (let x = 0; x < width; x++) {
    const top = Math.floor((y * png.height) / height), left = Math.floor((x * png.width) / width);
    const bottom = Math.max(top + 1, Math.floor(((y + 1) * png.height) / height));
    const right = Math.max(left + 1, Math.floor(((x + 1) * png.width) / width));
    for (let c = 0; c < 3; c++) {
      let sum = 0;
      for (let j = top; j < bottom; j++) for (let i = left; i < right; i++) sum += png.data[(j * png.width + i) * 4 + c];
      out[(c * height + y) * width + x] = sum / ((bottom - top) * (right - left) * 255);
    }
  }
  return out;
}

async function imageVector(bytes) {
  const pixels = new Tensor("float32", pixelsOf(PNG.sync.read(bytes)), [1, 3, height, width]);
  return (await images.run({ pixels })).vector.data;
}

const [sentence, ...files] = process.argv.slice(2);
if (sentence) {
  const query = await textVector(sentence);
  const dot = (vector) => vector.reduce((sum, value, i) => sum + value * query[i], 0);
  const hits = await Promise.all(files.map(async (file) => [dot(await imageVector(readFileSync(file))), file]));
  for (const [score, file] of hits.sort((a, b) => b[0] - a[0]).slice(0, 5)) console.log(score.toFixed(3), file);
} else {
  const facts = read("conformance.json");
  let largest = 0;
  const compare = (mine, wanted) => wanted.forEach((value, i) => (largest = Math.max(largest, Math.abs(value - mine[i]))));
  for (const one of facts.texts) compare(await textVector(one.text), one.vector);
  for (const one of facts.pictures) compare(await imageVector(Buffer.from(one.png, "base64")), one.vector);
  const share = largest / facts.tolerance;
  console.log(`Largest difference: ${share.toFixed(2)} of the tolerance: ${share <= 1 ? "passed" : "FAILED"}`);
  process.exitCode = share <= 1 ? 0 : 1;
}
