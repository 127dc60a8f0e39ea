// Parts of the page: elements, strips of numbers, matrices of pairs.
const KIND = DATA.kind, BUTTONS = 14;
const SMALL = 19, WIDE = 62; // rem for the columns of a matrix beside others, and of one alone
const state = {lang: DATA.lang, run: 0, step: 0, part: "", layer: 0, head: 0, row: 3, col: 1};

// Return a text of the page in the chosen language, that of this kind of model if it has one, with {name} filled in.
function t(key, given = {}) {
  const words = DATA.words[state.lang];
  return (words[`${KIND}.${key}`] ?? words[key]).replace(/\{(\w+)\}/g, (_, name) => given[name]);
}

// Make an element: class names after dots, properties, then children (text or elements).
function el(kind, given = {}, ...children) {
  const [tag, ...classes] = kind.split("."), made = document.createElement(tag);
  if (classes.length) made.className = classes.join(" ");
  for (const [name, value] of Object.entries(given))
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) made.setAttribute(name, value);
  made.append(...children.flat().filter(child => child !== null));
  return made;
}

const hint = text => { document.getElementById("hint").textContent = text; };
const hints = text => ({onmouseenter: () => hint(text), onmouseleave: () => hint("")});
const p = (key, given) => el("p", {}, t(key, given));

// Draw a vector: a coloured cell for each number, the number itself where few fit and on hover.
function strip(values, name, most = largest(values)) {
  const few = values.length <= 6;
  return el(`div.strip.${few ? "few" : "wide"}`, {role: "img", "aria-label": `${name}: ${values.map(number).join(", ")}`},
    values.map((v, i) => el("span", {style: `background: ${colour(v, most)}`, title: `${name}[${i + 1}] = ${number(v)}`,
      ...hints(`${name}[${i + 1}] = ${v.toPrecision(5)}`)}, number(v))));
}

// Draw a matrix of pairs. given: rows, cols (words), values, allowed, at ([row, column] or null), pick, name, show, and
// dense (cells without numbers) or small (in little room).
function matrix(given) {
  const {rows: asking, cols, values, allowed, at, pick, name, show = number} = given;
  const seen = values.map((line, i) => line.filter((_, j) => !allowed || allowed[i][j]));
  const most = given.most || largest(seen.flat()), dense = given.dense || cols.length > (given.small ? 6 : 11);
  const upright = Math.max(...cols.map(word => word.length)) > (dense ? 2 : 5), room = given.dense || given.small ? SMALL : WIDE;
  const cell = (v, i, j) => {
    const hidden = allowed && !allowed[i][j], told = hidden ? t("hidden") : show(v);
    const chosen = at && at[0] === i && at[1] === j;
    return el(`td${hidden ? ".hidden" : ""}${chosen ? ".chosen" : ""}`, {
      tabindex: chosen || (!at && !i && !j) ? 0 : -1, style: hidden ? null : `background: ${colour(v, most)}`,
      "data-row": i, "data-col": j, title: `${asking[i]} → ${cols[j]}: ${told}`,
      onclick: () => pick(i, j), onkeydown: event => walk(event, i, j, pick),
      ...hints(`${name}: ${asking[i]} → ${cols[j]}: ${hidden ? told : v.toPrecision(5)}`)}, hidden ? "×" : told);
  };
  const head = el("thead", {}, el("tr", {}, el("th"), cols.map(word => el("th", {scope: "col"}, word))));
  const body = el("tbody", {}, values.map((line, i) => el(`tr${at && at[0] === i ? ".chosen" : ""}`, {},
    el("th", {scope: "row", onclick: () => pick(i, at ? at[1] : 0)}, asking[i]), line.map((v, j) => cell(v, i, j)))));
  const made = el(`table.matrix${dense ? ".dense" : ""}${upright ? ".upright" : ""}`, {"data-matrix": given.id || "", "aria-label": name,
    style: dense ? `--cell: clamp(.5rem, min(${(room / cols.length).toFixed(3)}rem, (100vw - 5rem) / ${cols.length}), 1.35rem)` : null}, head, body);
  return el("div.scroll", {}, made);
}

// Move to the neighbouring cell of a matrix with the arrow keys.
function walk(event, i, j, pick) {
  const step = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], Enter: [0, 0], " ": [0, 0]}[event.key];
  if (!step) return;
  event.preventDefault();
  event.stopPropagation();
  const table = event.target.closest("table"), id = table.dataset.matrix;
  const [r, c] = [i + step[0], j + step[1]], find = root => root && root.querySelector(`td[data-row="${r}"][data-col="${c}"]`);
  if (!find(table)) return;
  pick(r, c);
  const again = find(document.querySelector(`table[data-matrix="${id}"]`));
  if (again) again.focus();
}

// Draw a table: heads (texts), lines (cells are texts or elements), and the number of the chosen line.
function list(heads, lines, chosen = -1) {
  return el("div.scroll", {}, el("table.list", {}, el("thead", {}, el("tr", {}, heads.map(h => el("th", {}, h)))),
    el("tbody", {}, lines.map((line, i) => el(`tr${i === chosen ? ".chosen" : ""}`, {},
      line.map((cell, j) => el(j ? (typeof cell === "string" ? "td.number" : "td") : "th", {}, cell)))))));
}

// Draw a row of buttons of which one is pressed, or a menu if there are many.
function choice(label, names, chosen, pick, id) {
  if (names.length > BUTTONS) return el("label.choice", {"data-choice": id}, el("span", {}, label),
    el("select", {onchange: event => pick(event.target.selectedIndex)}, names.map((name, i) =>
      el("option", {selected: i === chosen ? "" : null}, name === String(i + 1) ? name : `${i + 1} ${name}`))));
  return el("div.choice", {"data-choice": id}, el("span", {}, label), names.map((name, i) =>
    el("button", {type: "button", "aria-pressed": i === chosen, onclick: () => pick(i)}, name)));
}

const bar = v => el("span.bar", {style: `width: calc(var(--bar) * ${Math.max(0, Math.min(1, v)).toFixed(4)})`});
