// The steps of the explanation. Each draws a run and its chosen mixer.
const PARTS = {seq2seq: ["encoder", "decoder", "cross"], lm: ["lm"], encoder: ["both"]}[KIND];
// Return the mixer of a part at the chosen layer, or at the last one before it that the page holds.
const siteOf = (run, part = state.part) => {
  const those = run.sites.filter(s => s.part === part);
  return those.findLast(s => s.layer <= state.layer) || those[0];
};
const sides = (run, part) => [part === "encoder" ? run.source : run.target, part === "decoder" ? run.target : run.source];
const place = site => t("where", {part: t(site.part), layer: site.layer + 1, mixer: site.mixer});
const allowedOf = site => rows(site.allowed);
const pick = (i, j) => set({row: i, col: j});

// Describe the pair of words that is chosen, for the texts.
function pair(run, site) {
  const [asking, asked] = sides(run, site.part);
  return {ask: asking.pieces[state.row], key: asked.pieces[state.col], head: state.head + 1};
}

// Draw the matrix of one head of a mixer.
function map(run, site, values, name, given = {}) {
  const [asking, asked] = sides(run, site.part);
  return matrix({rows: asking.pieces, cols: asked.pieces, values, allowed: allowedOf(site), at: [state.row, state.col],
    pick, name, id: site.part, ...given});
}

const attentive = (draw, other) => (run, site) => (site.kind === "attention" ? draw : other)(run, site);
const hiddenPairs = site => site.allowed.values.filter(ok => !ok).length;

// The logits of a row before the mask: products times scale, plus a bias.
function logits(site, head, i) {
  const bias = site.bias ? row(site.bias, head, i) : null;
  return row(site.products, head, i).map((v, j) => v * site.scale + (bias ? bias[j] : 0));
}

// The part of a mixer's weights that would go to hidden words if there were no mask, over all heads and rows.
function leaked(site) {
  const [heads, T] = site.weights.shape, allowed = allowedOf(site);
  let lost = 0;
  for (let h = 0; h < heads; h++)
    for (let i = 0; i < T; i++) lost += sum(softmax(logits(site, h, i)).filter((_, j) => !allowed[i][j]));
  return lost / (heads * T);
}

// How often two heads put the most weight on different words, and out of how many rows.
function different(site) {
  const [heads, T] = site.weights.shape;
  let found = 0;
  for (let i = 0; i < T; i++)
    if (new Set([...Array(heads).keys()].map(h => best(row(site.weights, h, i)))).size > 1) found++;
  return {found, T, heads};
}

function drawEmbedding(run) {
  const side = run.source, all = rows(side.embedded), most = largest(all.flat());
  return [p("embed_text", {size: all[0].length}), list([t("word"), t("embedding")],
    side.pieces.map((piece, i) => [piece, strip(all[i], piece, most)]), state.row), p("colours")];
}

function drawPositions(run) {
  const side = run.source, i = Math.min(state.row, side.pieces.length - 1);
  if (!side.positions) return [p("positions_none")];
  const [a, b] = [row(side.embedded, i), row(side.positions, i)], both = a.map((v, n) => v + b[n]), most = largest([...a, ...b, ...both]);
  const told = {loss: loss(run.loss), other: run.unordered_loss === null ? "" : loss(run.unordered_loss), unordered: run.unordered};
  return [p("positions_text"), list([side.pieces[i], ""], [
    [t("embedding"), strip(a, t("embedding"), most)], [`+ ${t("position")} ${i + 1}`, strip(b, t("position"), most)],
    [`= ${t("enters")}`, strip(both, t("enters"), most)]]),
  el("h3", {}, t("allpositions")), list([t("word"), t("position")], side.pieces.map((piece, n) => [`${n + 1} ${piece}`,
    strip(row(side.positions, n), `${t("position")} ${n + 1}`)])), el("p.key", {}, t("positions_number", told))];
}

function drawQkv(run, site) {
  const [asking, asked] = sides(run, site.part), head = site.kind === "attention" ? state.head : 0;
  const shown = [["q", asking], ["k", asked], ["v", asked]].filter(([name]) => site[name]);
  if (!shown.length) return [p("qkv_none", {mixer: site.mixer})];
  const made = site.kind === "attention" ? [p("qkv_text"), p(`qkv_${site.part}`), p("qkv_roles")]
    : [p("qkv_maps", {mixer: site.mixer}), p("qkv_other", {mixer: site.mixer, step: t("products_name")})];
  for (const [name, side] of shown) {
    const all = rows(site[name], head), most = largest(all.flat());
    made.push(el("h3", {}, t(`${name}_${site.kind === "attention" ? "long" : "short"}`)), list([t("word"), `${all[0].length} ${t("numbers")}`],
      side.pieces.map((piece, i) => [piece, strip(all[i], `${name} ${piece}`, most)]), name === "q" ? state.row : -1));
  }
  return [...made, p("colours")];
}

function drawProducts(run, site) {
  const [h, i, j] = [state.head, state.row, state.col], [q, k] = [row(site.q, h, i), row(site.k, h, j)];
  const terms = q.map((v, n) => v * k[n]), most = largest([...q, ...k]);
  const plus = terms.filter(v => v > 0), minus = terms.filter(v => v < 0);
  return [p("products_text"), map(run, site, rows(site.products, h), "Q·K", {allowed: null}),
    el("h3", {}, t("onecell", pair(run, site))), list(["", ""], [[`q ${pair(run, site).ask}`, strip(q, "q", most)],
      [`k ${pair(run, site).key}`, strip(k, "k", most)], ["q × k", strip(terms, "q×k")]]),
    el("p.key", {id: "product"}, t("products_sum", {plus: plus.length, minus: minus.length, gain: number(sum(plus)),
      loss: number(sum(minus)), all: number(sum(terms))}))];
}

function drawMask(run, site) {
  const hidden = hiddenPairs(site), whole = site.allowed.values.length;
  return [p("mask_text"), p(`mask_${site.part}`), map(run, site, rows(site.products, state.head), "Q·K"),
    el("p.key", {}, hidden ? t("mask_number", {hidden, whole, leaked: percent(leaked(site))}) : t("mask_nothing", {whole})),
    p("mask_padding")];
}

function drawSoftmax(run, site) {
  const [h, i] = [state.head, state.row], [, asked] = sides(run, site.part), raw = row(site.products, h, i);
  const scaled = logits(site, h, i), weights = row(site.weights, h, i), ok = allowedOf(site)[i];
  const lines = asked.pieces.map((piece, j) => [piece, number(raw[j]), ok[j] ? number(scaled[j]) : "−∞",
    el("span", hints(`${piece}: ${weights[j].toPrecision(5)}`), bar(weights[j]), percent(weights[j]))]);
  return [p("softmax_text", {scale: number(site.scale), size: site.q.shape[2]}), site.bias ? p("softmax_bias") : null,
    el("div.side", {}, el("div", {}, el("h3", {}, t("onerow", pair(run, site))),
      list([t("word"), "q·k", `× ${number(site.scale)}`, t("weight")], lines, state.col)),
    el("div", {}, el("h3", {}, t("allweights")), map(run, site, rows(site.weights, h), t("weight"), {show: percent, most: 1}))),
    el("p.key", {}, t("softmax_number", {sum: percent(sum(weights)), ask: pair(run, site).ask, word: asked.pieces[best(weights)],
      most: percent(Math.max(...weights))}))];
}

function drawSum(run, site) {
  const [h, i] = [state.head, state.row], [, asked] = sides(run, site.part), weights = row(site.weights, h, i);
  const values = rows(site.v, h), parts = values.map((v, j) => v.map(n => n * weights[j])), most = largest(values.flat());
  const mixed = values[0].map((_, n) => sum(parts.map(part => part[n])));
  return [p("sum_text"), list([t("word"), t("weight"), t("value"), t("weighted")], asked.pieces.map((piece, j) =>
    [piece, percent(weights[j]), strip(values[j], `v ${piece}`, most), strip(parts[j], `${t("weighted")} ${piece}`, most)]), state.col),
  el("h3", {}, t("sum_all", pair(run, site))), strip(mixed, t("sum"), most), p("sum_after"),
  el("h3", {}, t("output", pair(run, site))), strip(row(site.output, i), t("output_short"))];
}

function drawHeads(run, site) {
  const heads = [...Array(site.weights.shape[0]).keys()], told = different(site);
  const figure = h => el(`figure${h === state.head ? ".picked" : ""}`, {"data-head": h},
    map(run, site, rows(site.weights, h), `${t("head")} ${h + 1}`, {dense: true, show: percent, most: 1, id: `head${h}`,
      pick: (i, j) => set({head: h, row: i, col: j})}),
    el("figcaption", {}, t("head_loss", {head: h + 1, loss: loss(run.loss), other: loss(run.loss + site.muted[h])})));
  return [p("heads_text", {heads: heads.length}), el("div.side", {}, heads.map(figure)),
    el("p.key", {}, heads.length > 1 ? t("heads_number", told) : t("heads_one"))];
}

function drawPlaces(run) {
  const each = PARTS.map(part => siteOf(run, part)).map(site => el(`figure${site.part === state.part ? ".picked" : ""}`, {},
    el("h3", {}, place(site)), map(run, site, rows(site.mean), t("effective"), {dense: true, id: `place-${site.part}`,
      at: site.part === state.part ? [state.row, state.col] : null, pick: (i, j) => set({part: site.part, row: i, col: j})}),
    el("figcaption", {}, t(`place_${site.part}`))));
  return [p("places_text"), el("div.side", {}, each)];
}

// The layers of a model one after the other.
function drawLayers(run) {
  const chosen = siteOf(run), each = run.sites.map(site => el(`figure${site === chosen ? ".picked" : ""}`, {"data-layer": site.layer},
    el("h3", {}, place(site)), map(run, site, rows(site.mean), t("effective"), {dense: true, id: `layer-${site.layer}`,
      at: site === chosen ? [state.row, state.col] : null, pick: (i, j) => set({layer: site.layer, row: i, col: j})})));
  return [p("layers_text", {count: run.layers, shown: run.sites.length}), el("div.side", {}, each), p("layers_after")];
}

function drawMixers() {
  const found = DATA.runs.map((run, n) => {
    const site = siteOf(run), shown = [kindText(site), ...(site.family ? [familyText(site)] : [])];
    const many = site.kind === "values" && site.channels > 1, channel = Math.min(state.head, site.weights.shape[0] - 1);
    if (many) shown.push(choice(t("channel"), [...Array(site.weights.shape[0]).keys()].map(i => String(i + 1)), channel,
      i => set({run: n, head: i}), `channel${n}`), map(run, site, rows(site.weights, channel), `${t("channel")} ${channel + 1}`, {dense: true, id: `channel-${n}`}));
    return el("figure", {"data-run": n}, el("h3", {}, `${run.name}: ${place(site)}`), el("p.note", {}, t("note", {written: run.written, loss: loss(run.loss)})),
      effective(run, site, {id: `run-${n}`, small: DATA.runs.length > 1}), el("figcaption", {}, sumsText(site)), ...shown);
  });
  return [p("mixers_text"), DATA.runs.length > 1 ? null : p("mixers_one"), el("div.side", {}, found)].filter(Boolean);
}

function drawAnswers(run) {
  const answer = (key, given) => [el("h3", {}, t(`${key}_question`)), p(`${key}_answer`), ...(given ? [el("p.key", {}, t(`${key}_here`, given))] : [])];
  const sites = run.sites.filter(s => s.kind === "attention"), site = sites.find(s => s === siteOf(run)) || sites.at(-1);
  const own = run.sites.find(s => s.kind === "attention" && hiddenPairs(s));
  if (!site) return [...answer("why_products"), ...answer("why_qkv"), ...answer("why_heads"), ...answer("why_masks"), ...answer("why_positions")];
  const [asking, asked] = sides(run, site.part), h = Math.min(state.head, site.weights.shape[0] - 1), i = Math.min(state.row, asking.pieces.length - 1);
  const products = row(site.products, h, i), weights = row(site.weights, h, i), top = best(weights), worst = weights.indexOf(Math.min(...weights));
  const told = {where: place(site), head: h + 1, ask: asking.pieces[i], key: asked.pieces[top], least: asked.pieces[worst], product: number(products[top]),
    other: number(products[worst]), weight: percent(weights[top]), rest: percent(weights[worst])};
  const costs = site.muted.map((v, n) => `${n + 1}: ${v < 0 ? "" : "+"}${loss(v)}`).join(", ");
  const positions = run.source.positions && run.unordered_loss !== null;
  return [...answer("why_products", told), ...answer("why_qkv", told), ...answer("why_heads", {where: place(site), costs, ...different(site)}),
    ...answer("why_masks", own && {leaked: percent(leaked(own))}),
    ...answer("why_positions", positions && {loss: loss(run.loss), other: loss(run.unordered_loss), unordered: run.unordered})];
}

const STEPS = [
  {key: "tokens", draw: drawTokens},
  {key: "embed", draw: drawEmbedding},
  {key: "positions", draw: drawPositions, uses: ["sourceword"]},
  {key: "qkv", draw: drawQkv, uses: ["place", "head", "word"]},
  {key: "products", draw: attentive(drawProducts, otherProducts), uses: ["place", "head"]},
  {key: "mask", draw: attentive(drawMask, otherMask), uses: ["place", "head"]},
  {key: "softmax", draw: attentive(drawSoftmax, otherSoftmax), uses: ["place", "head", "word"]},
  {key: "sum", draw: attentive(drawSum, otherSum), uses: ["place", "head", "word"]},
  {key: "heads", draw: attentive(drawHeads, otherHeads), uses: ["place"]},
  KIND === "seq2seq" ? {key: "places", draw: drawPlaces, uses: ["place"]} : {key: "layers", draw: drawLayers, uses: ["place"]},
  {key: "words", draw: drawWords, uses: KIND === "seq2seq" ? [] : ["word"]},
  {key: "mixers", draw: drawMixers, uses: ["place"]},
  {key: "answers", draw: drawAnswers, uses: ["place", "head", "word"]},
];
