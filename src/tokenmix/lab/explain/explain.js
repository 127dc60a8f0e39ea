// The frame of the page: title, steps, choices, keys.
const byId = id => document.getElementById(id);

function set(changes) {
  Object.assign(state, changes);
  const run = DATA.runs[state.run];
  const site = siteOf(run), [asking, asked] = sides(run, site.part);
  state.layer = site.layer;
  state.head = Math.min(state.head, site.weights.shape[0] - 1);
  state.row = Math.min(state.row, asking.pieces.length - 1);
  state.col = Math.min(state.col, asked.pieces.length - 1);
  draw();
}

// Return what stands behind the text: the translation, how it goes on, or its class.
function written(run) {
  if (!run.written) return [];
  return KIND === "lm" ? [el("b", {}, run.written)] : [" → ", el("b", {}, run.classes ? `${t("class")} ${run.written}` : run.written)];
}

function draw() {
  const run = DATA.runs[state.run], step = STEPS[state.step];
  document.documentElement.lang = state.lang === "zh" ? "zh-CN" : "en";
  document.title = byId("title").textContent = t("title");
  byId("language").textContent = t("language");
  byId("back").textContent = `← ${t("back")}`;
  byId("next").textContent = `${t("next")} →`;
  byId("back").disabled = state.step === 0;
  byId("next").disabled = state.step === STEPS.length - 1;
  byId("sentence").replaceChildren(run.text, ...written(run), ` (${run.name})`);
  byId("steps").replaceChildren(...STEPS.map((each, i) => el("button", {type: "button", title: t(`${each.key}_name`),
    "aria-current": i === state.step ? "step" : null, "data-step": each.key, onclick: () => set({step: i})},
    `${i + 1} `, el("span.name", {}, t(`${each.key}_name`)))));
  byId("tools").replaceChildren(...tools(run, step));
  byId("stage").replaceChildren(el("h2", {}, t(`${step.key}_title`)), ...step.draw(run, siteOf(run)).flat().filter(Boolean));
  hint("");
}

// The choices that a step offers: the run, the place, the layer, the head, the word.
function tools(run, step) {
  const uses = step.uses || [], site = siteOf(run), found = [];
  const layers = run.sites.filter(s => s.part === state.part);
  if (DATA.runs.length > 1) found.push(choice(t("model"), DATA.runs.map(r => r.name), state.run, i => set({run: i}), "run"));
  if (uses.includes("place") && PARTS.length > 1)
    found.push(choice(t("place"), PARTS.map(part => t(part)), PARTS.indexOf(state.part), i => set({part: PARTS[i]}), "place"));
  if (uses.includes("place") && layers.length > 1)
    found.push(choice(t("layer"), layers.map(s => String(s.layer + 1)), layers.indexOf(site), i => set({layer: layers[i].layer}), "layer"));
  const split = site.kind === "attention" || step.key === "products" && site.family.tables.some(a => a.numbers.shape.length === 3);
  if (uses.includes("head") && split && site.weights.shape[0] > 1)
    found.push(choice(t("head"), [...Array(site.weights.shape[0]).keys()].map(i => String(i + 1)), state.head, i => set({head: i}), "head"));
  if (uses.includes("word"))
    found.push(choice(t("word"), sides(run, state.part)[0].pieces, state.row, i => set({row: i}), "word"));
  if (uses.includes("sourceword"))
    found.push(choice(t("word"), run.source.pieces, Math.min(state.row, run.source.pieces.length - 1), i => set({row: i, part: PARTS[0]}), "word"));
  return found;
}

const go = by => set({step: Math.max(0, Math.min(STEPS.length - 1, state.step + by))});
byId("back").addEventListener("click", () => go(-1));
byId("next").addEventListener("click", () => go(1));
byId("language").addEventListener("click", () => set({lang: state.lang === "en" ? "zh" : "en"}));
document.addEventListener("keydown", event => {
  if (event.altKey || event.ctrlKey || event.metaKey || event.target.tagName === "SELECT") return;
  if (event.key === "ArrowRight") go(1);
  if (event.key === "ArrowLeft") go(-1);
});

// An address that ends with #products or #mask,decoder opens that step at that place. A language model is asked what
// follows the text, so its last token is chosen; of a masked model the first one that is hidden.
const [opened, where] = location.hash.slice(1).split(","), end = DATA.runs[0].source.pieces.length - 1;
const first = Math.max(0, DATA.runs[0].choices.findIndex(found => found.length));
set({step: Math.max(0, STEPS.findIndex(step => step.key === opened)), part: PARTS.includes(where) ? where : PARTS[0],
  ...(KIND === "lm" ? {row: end, col: end - 1} : KIND === "encoder" ? {row: first} : {})});
