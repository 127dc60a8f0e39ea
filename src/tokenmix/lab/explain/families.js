// Mixers other than softmax attention: what their family does, with its own numbers, and their effective weights.
const MAPS = 6;

// Return the words that name the rows of a family's table.
function rowNames(run, site, table, count) {
  const [asking, asked] = sides(run, site.part);
  if (table.rows === "asking") return asking.pieces;
  if (table.rows === "asked") return asked.pieces;
  return [...Array(count).keys()].map(i => table.rows === "heads" ? `${t("head")} ${i + 1}` : "Σ");
}

// Draw a table of a family: pairs as a matrix, others as one strip for each row; of several heads the chosen one.
function drawTable(run, site, table) {
  const a = table.numbers, head = a.shape.length === 3 ? Math.min(state.head, a.shape[0] - 1) : null;
  const values = head === null ? rows(a) : rows(a, head), names = rowNames(run, site, table, values.length);
  const title = t(table.name) + (head === null || a.shape[0] === 1 ? "" : ` (${t("head")} ${head + 1})`);
  if (table.pairs) return [el("h3", {}, title), map(run, site, values, title, {id: table.name})];
  const most = largest(values.flat());
  return [el("h3", {}, title), list([table.rows === "heads" ? "" : t("word"), `${values[0].length} ${t("numbers")}`],
    names.map((name, i) => [name, strip(values[i], name, most)]), table.rows === "asking" ? state.row : -1)];
}

// Tell how the family of a mixer weighs words, with its numbers in the text.
function familyText(site) {
  const given = Object.fromEntries(Object.entries(site.family.given).map(([name, v]) =>
    [name, typeof v === "number" && !Number.isInteger(v) ? number(v) : v]));
  return p(`family_${site.family.key}`, {mixer: site.mixer, ...given});
}

const effective = (run, site, given = {}) => map(run, site, rows(site.mean), t("effective"), given);
const kindText = site => p(`kind_${site.kind}`, {channels: site.channels});

function sumsText(site) {
  const sums = rows(site.mean).map(sum);
  return t("rowsums", {from: number(Math.min(...sums)), to: number(Math.max(...sums))});
}

// In place of products: how this mixer makes its weights.
const otherProducts = (run, site) => [p("noproducts", {mixer: site.mixer}), familyText(site),
  ...site.family.tables.flatMap(table => drawTable(run, site, table)), p("colours"),
  ...(site.family.tables.length ? [] : [effective(run, site)])];

// In place of the mask over products: the pairs that count for nothing.
function otherMask(run, site) {
  const hidden = hiddenPairs(site), whole = site.allowed.values.length;
  return [p(`mask_${site.part}`), p("mask_other", {mixer: site.mixer}), effective(run, site),
    el("p.key", {}, hidden ? t("mask_count", {hidden, whole}) : t("mask_nothing", {whole}))];
}

// In place of softmax: the effective weights.
const otherSoftmax = (run, site) => [p("nosoftmax", {mixer: site.mixer}), effective(run, site), kindText(site),
  site.kind === "values" ? el("p.key", {}, sumsText(site)) : null];

// In place of the sum of one head: each word's weight and value, and the output.
function otherSum(run, site) {
  const i = state.row, [, asked] = sides(run, site.part), weights = row(site.mean, i), ok = allowedOf(site)[i];
  const values = site.v && rows(site.v, 0), most = values && largest(values.flat()), high = largest(weights) || 1;
  const lines = asked.pieces.map((piece, j) => [piece, el("span", {}, ok[j] ? [bar(Math.abs(weights[j]) / high), number(weights[j])] : "×"),
    ...(values ? [strip(values[j], `v ${piece}`, most)] : [])]);
  return [p(site.kind === "values" ? "sum_other" : "sum_jacobian", {mixer: site.mixer}),
    list([t("word"), t("effective"), ...(values ? [t("value")] : [])], lines, state.col),
    el("h3", {}, t("output", pair(run, site))), strip(row(site.output, i), t("output_short"))];
}

// In place of heads: some of the maps of a mixer, one for each head or channel.
function otherHeads(run, site) {
  if (site.kind !== "values" || site.channels === 1) return [p("heads_none", {mixer: site.mixer}), effective(run, site, {dense: true})];
  const count = Math.min(MAPS, site.weights.shape[0]), most = largest(rowsOf(site.weights, count).flat());
  const figure = h => el(`figure${h === state.head ? ".picked" : ""}`, {"data-head": h}, el("h3", {}, `${t("channel")} ${h + 1}`),
    map(run, site, rows(site.weights, h), `${t("channel")} ${h + 1}`, {dense: true, most, id: `head${h}`, pick: (i, j) => set({head: h, row: i, col: j})}));
  return [p("heads_other", {mixer: site.mixer, channels: site.channels, count}), el("div.side", {}, [...Array(count).keys()].map(figure))];
}
