// The ranks: a row for each, or for those in the same state.

/** A row. `age` is filled in as time passes; `pick` chooses its ranks. */
function rankRow(row, { look, stages, chosen, age, pick }) {
  const { mark, word, tone } = look;
  const waits = row.waits_for && `${row.role === "waiting" ? "" : "waits "}for ${nameRanks(row.waits_for)}`;
  const setUp = row.stages_passed < stages.length && row.role !== "ended";
  const now = stages[(row.entering || row.stages_passed) - 1]?.name ?? "not launched";
  const doing = row.text || (row.entering ? now : "");
  return make(
    "div",
    { class: `ddpb-row ddpb-${tone}`, role: "listitem", title: row.process },
    make(
      "button",
      { class: "ddpb-ranks", type: "button", "data-first": row.first, "aria-pressed": String(chosen), title: "Choose for Continue, Step, Where and Restart", "aria-label": `Choose ${nameRanks(row.ranks)}`, onclick: pick },
      row.ranks,
      row.count > 2 && make("small", {}, ` ×${row.count}`),
    ),
    make("span", { class: "ddpb-chip" }, sign(mark), word),
    make("span", { class: "ddpb-for" }, waits),
    age,
    make(
      "span",
      { class: "ddpb-doing", title: [waits, doing].filter(Boolean).join(": ") },
      setUp && stageStrip(row, stages, now),
      doing,
    ),
  );
}

/** How far a rank is with its setup: only until it is done. */
function stageStrip(row, stages, now) {
  const strip = stages.map((stage, i) => {
    const state = i + 1 <= row.stages_passed ? "passed" : i + 1 === row.entering ? (row.gone ? "failed" : "entering") : "to come";
    return make("i", { class: `ddpb-${state.replace(" ", "-")}`, title: `${i + 1} ${stage.name}: ${state}. ${stage.about}` });
  });
  return make("span", { class: "ddpb-strip", role: "img", "aria-label": `stage ${row.stages_passed} of ${stages.length}: ${now}` }, strip);
}
