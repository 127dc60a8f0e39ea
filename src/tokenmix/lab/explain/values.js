// Arrays of the page, colours and numbers as text.
const DATA = JSON.parse(document.getElementById("data").textContent);

// Turn an array as it is stored, shape and float32 numbers in base64, into one with numbers.
function decoded(stored) {
  if (!stored) return null;
  const raw = atob(stored.data), bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return {shape: stored.shape, values: new Float32Array(bytes.buffer)};
}

// Return the row (the last axis) at the given indices.
function row(a, ...at) {
  const width = a.shape[a.shape.length - 1];
  let start = 0;
  at.forEach((index, axis) => { start = start * a.shape[axis] + index; });
  return Array.from(a.values.subarray(start * width, (start + 1) * width));
}

const rows = (a, ...at) => [...Array(a.shape[a.shape.length - 2]).keys()].map(i => row(a, ...at, i));
const sum = values => values.reduce((a, b) => a + b, 0);
const largest = values => values.reduce((most, v) => Number.isFinite(v) ? Math.max(most, Math.abs(v)) : most, 0);
const best = values => values.indexOf(Math.max(...values));

// Return exp(values) divided by their sum.
function softmax(values) {
  const most = Math.max(...values), powers = values.map(v => Math.exp(v - most)), whole = sum(powers);
  return powers.map(p => p / whole);
}

const number = v => !Number.isFinite(v) ? "−∞" :
  (v !== 0 && Math.abs(v) < 0.005 ? v.toPrecision(1) : v.toFixed(Math.abs(v) < 100 ? 2 : 0)).replace("-", "−");
const loss = v => v.toFixed(Math.abs(v) < 0.1 ? 4 : 2).replace("-", "−");
const percent = v => `${(100 * v).toFixed(Math.abs(v) < 0.0995 ? 1 : 0)} %`;

function colour(v, most) {
  if (!Number.isFinite(v) || !most) return "transparent";
  return `rgba(var(${v < 0 ? "--minus" : "--plus"}), ${(0.7 * Math.min(1, Math.abs(v) / most)).toFixed(3)})`;
}

// Return the rows of the first maps of an array.
const rowsOf = (a, count) => [...Array(count).keys()].flatMap(n => rows(a, n));

for (const run of DATA.runs) {
  run.target ??= run.source;
  for (const side of new Set([run.source, run.target]))
    for (const name of ["embedded", "positions"]) side[name] = decoded(side[name]);
  for (const site of run.sites) {
    for (const table of site.family ? site.family.tables : []) table.numbers = decoded(table.numbers);
    for (const name of ["output", "q", "k", "v", "products", "bias", "mixed", "allowed", "mean", "weights"])
      site[name] = decoded(site[name]);
  }
}
