// Below the ranks: the lines in which they are, and what the buttons answered.

/**
 * Draw all of it into `element`. `state` gives a part of what is known by its name, as
 * `widget.py` names them (`locations`, `answers`, ...); what is of the past has none of the lines
 * of now (`state("past")`). `send` sends a message to the kernel.
 */
function drawTabs(element, state, send) {
  if (!element.firstChild) element.append(make("div", { class: "ddpb-sources" }), make("div", { class: "ddpb-answers", "aria-live": "polite" }));
  const [sources, answers] = element.children;
  drawSources(sources, state("past") ? [] : state("locations"));
  drawAnswers(answers, state("answers"));
}

function drawSources(element, locations) {
  show(element, locations, () =>
    locations.map((location) =>
      make(
        "figure",
        { class: "ddpb-source" },
        make("figcaption", {}, make("b", {}, nameRanks(location.ranks)), ` at ${location.call_site}`),
        location.callers.length > 0 && make("div", { class: "ddpb-callers" }, `from ${location.callers.join(" → ")}`),
        make(
          "pre",
          {},
          location.lines.map(([number, text]) =>
            make("div", { class: number === location.line ? "ddpb-here" : "" }, `${number === location.line ? "▸" : " "}${String(number).padStart(4)}  ${text}`),
          ),
        ),
      ),
    ),
  );
}

function drawAnswers(element, answers) {
  show(element, answers, () =>
    answers.map((answer, i) =>
      make(
        "details",
        { class: `ddpb-answer${answer.ok ? "" : " ddpb-bad"}`, open: i === 0 },
        make("summary", {}, make("code", {}, answer.magic), answer.ok ? "" : " did not work"),
        make("pre", {}, answer.text),
      ),
    ),
  );
}
