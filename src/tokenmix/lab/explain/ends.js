// The first step and the last: what is read, and what is written or predicted.
const tokenButtons = side => el("div.choice", {}, side.pieces.map((piece, i) =>
  el("span.word", hints(`${piece}: ${side.ids[i]}`), el("button", {type: "button"}, piece, el("small", {}, String(side.ids[i]))))));

function drawTokens(run) {
  const told = p(run.classes ? "tokens_class" : "tokens_target", {written: run.written});
  if (KIND !== "seq2seq") return [p("tokens_text", {count: run.source.pieces.length}), tokenButtons(run.source), told];
  return [p("tokens_text"), el("h3", {}, t("source")), tokenButtons(run.source), el("h3", {}, t("target")), tokenButtons(run.target), told];
}

// Draw the likeliest pieces as bars.
const candidates = found => el("table.list", {}, el("tbody", {}, found.map(([piece, chance]) =>
  el("tr", {}, el("th", {}, piece), el("td", {}, bar(chance), percent(chance))))));
const likely = chance => el("span", {}, bar(chance), percent(chance));
// The cells of a token's probability, and of the likeliest piece beside it.
const beside = (chance, [piece, most]) => [likely(chance), el("span", {}, piece), likely(most)];

function drawWords(run) {
  if (run.classes) return [p("words_class", {written: run.written}), candidates(run.choices[0].map(([name, chance]) => [`${t("class")} ${name}`, chance]))];
  if (KIND === "lm") return drawNext(run);
  if (KIND === "encoder") return drawHidden(run);
  return [p("words_text"), el("div.side", {}, run.target.pieces.map((piece, i) =>
    el("figure", {}, el("h3", {}, t("after", {piece})), candidates(run.choices[i]))))];
}

// What a language model expects after the chosen token, and how likely it found each token of the text.
function drawNext(run) {
  const {pieces} = run.target, i = Math.min(state.row, pieces.length - 1);
  const lines = run.chances.map((chance, n) => [pieces[n], el("span", {}, pieces[n + 1]), ...beside(chance, run.choices[n][0])]);
  return [p("words_text"), el("h3", {id: "after"}, t("after", {piece: pieces[i]})), candidates(run.choices[i]),
    el("p.key", {}, t("words_number", {loss: loss(run.loss), bits: loss(run.loss / Math.LN2), written: run.written})),
    el("h3", {}, t("words_all")), list([t("word"), t("follows"), t("chance"), t("likeliest"), t("chance")], lines, i)];
}

// What an encoder expects where each token is hidden.
function drawHidden(run) {
  const {pieces} = run.target, i = Math.min(state.row, pieces.length - 1);
  const lines = pieces.map((piece, n) => [piece, ...(run.choices[n].length ? beside(run.chances[n], run.choices[n][0]) : ["", "", ""])]);
  return [p("words_text"), el("h3", {id: "after"}, t("instead", {piece: pieces[i]})),
    run.choices[i].length ? candidates(run.choices[i]) : p("words_never"), el("p.key", {}, t("words_number", {loss: loss(run.loss)})),
    el("h3", {}, t("words_all")), list([t("word"), t("chance"), t("likeliest"), t("chance")], lines, i)];
}
