// The ranks: a row for each, or for those in the same state; in setup, how far each of them is.

/** A row. `age` is filled in as time passes; `pick` chooses its ranks. */
function rankRow(row, { look, chosen, age, pick }) {
  const { mark, word, tone } = look;
  const waits = row.waits_for && `waits for ${row.waits_for.replaceAll(",", ", ")}`;
  const [state, ...more] = waits && (word === "waiting" || row.status === "setting up") ? [waits] : [word, waits];
  const doing = [...more, row.text || (row.word === "finished" && row.role !== "ready" && row.word)].filter(Boolean).join(" · ") || row.process;
  return make(
    "div",
    { class: `ddpb-row ddpb-${tone}`, role: "listitem", title: row.process },
    make(
      "button",
      { class: "ddpb-ranks", type: "button", "data-first": row.first, "aria-pressed": String(chosen), title: "Choose for Continue, Step, Where and Restart", "aria-label": `Choose ${nameRanks(row.ranks)}`, onclick: pick },
      row.ranks,
      row.count > 2 && make("small", {}, ` ×${row.count}`),
    ),
    make("span", { class: "ddpb-chip" }, sign(mark), state),
    make("span", { class: "ddpb-doing", title: [waits, row.text].filter(Boolean).join(": ") }, doing),
    age,
  );
}

/** The stages as columns, in which ranks are where they have got to: of each row one line, or one line for all. */
function stageWalk(rows, stages, inline) {
  const at = (row) => Math.min(stages.length - 1, row.entering ? row.entering - 1 : row.stages_passed);
  const token = (row) => make("b", { class: `ddpb-${row.gone ? "bad" : row.role === "paused" ? "paused" : row.entering ? "busy" : "idle"}` }, row.ranks);
  const lines = inline ? rows.map((row) => [row]) : [rows];
  const line = (own) => stages.map((stage, i) => make("span", { class: own.every((row) => row.stages_passed > i) ? "ddpb-passed" : null }, own.filter((row) => (row.stages_passed < stages.length ? at(row) === i : i === stages.length - 1)).map(token)));
  const names = stages.map(({ name, about }) => make("small", { title: about }, name));
  return [...lines.flatMap(line), ...names];
}
