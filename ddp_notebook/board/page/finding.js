// The finding: what is wrong, both sides of it beside each other, the fix. The rest is folded.

/** `act` runs a magic. What the user has unfolded stays so when findings change. */
function drawFindings(element, findings, act) {
  if (element.firstChild) element.unfolded = Boolean(element.querySelector(".ddpb-evidence")?.open);
  show(element, findings, () => {
    const [first, ...others] = findings;
    return first && [findingBox(first, others, act, element)];
  });
}

function findingBox(finding, others, act, slot) {
  const sides = finding.sides ?? [];
  return make(
    "section",
    { class: `ddpb-finding ddpb-${finding.passing ? "warn" : "bad"}` },
    sentenceOf(finding, sides.length > 0),
    sides.length > 0 && make("div", { class: "ddpb-sides" }, sides.slice(0, 2).map(sideBox)),
    remedyOf(finding, act),
    make(
      "details",
      { class: "ddpb-evidence", open: slot.unfolded },
      make("summary", {}, others.length ? `Evidence and ${others.length} more ${others.length === 1 ? "finding" : "findings"}` : "Evidence", " ", categoryOf(finding)),
      make("div", {}, finding.sentence),
      finding.waiting && make("div", { class: "ddpb-waiting" }, finding.waiting),
      make("code", { class: "ddpb-whole" }, finding.remedy),
      sides.length > 2 && make("div", { class: "ddpb-sides" }, sides.slice(2).map(sideBox)),
      finding.evidence.length > 0 && make("ul", {}, finding.evidence.map((fact) => make("li", {}, fact))),
      others.map((other) => make("div", { class: `ddpb-further ddpb-${other.passing ? "warn" : "bad"}` }, sentenceOf(other), categoryOf(other), remedyOf(other, act))),
    ),
  );
}

function sentenceOf(finding, short = false) {
  return make(
    "div",
    { class: `ddpb-sentence${short ? " ddpb-short" : ""}`, title: finding.sentence },
    sign(finding.symbol),
    make("b", {}, finding.sentence),
  );
}

const categoryOf = (finding) => make("span", { class: "ddpb-category" }, finding.passing ? "busy, not stuck" : finding.category);

function remedyOf(finding, act) {
  return make(
    "div",
    { class: "ddpb-remedy" },
    make("span", { class: "ddpb-todo" }, "Fix"),
    make("span", { class: "ddpb-fix", title: finding.remedy }, finding.remedy),
    copyButton(finding.remedy, "the fix"),
    finding.magics.map((magic) => make("button", { class: "ddpb-small ddpb-run", type: "button", onclick: () => act(magic) }, "Run ", make("code", {}, magic))),
  );
}

/** What ranks called, and the line with those around it. */
function sideBox({ ranks, call, tensor, site, lines, line }) {
  return make(
    "figure",
    { class: "ddpb-side" },
    make("figcaption", { title: [nameRanks(ranks), call, tensor, site].filter(Boolean).join(" · ") }, make("b", {}, `${nameRanks(ranks)} `), site && siteLink(site, lines.find(([number]) => number === line)?.[1]), ` ${call} ${tensor}`),
    make("pre", {}, lines.filter(([number]) => Math.abs(number - line) < 2).map((each) => codeLine(each, line))),
  );
}

function codeLine([number, text], line) {
  const here = number === line;
  return make("div", { class: here ? "ddpb-here" : "", title: text.trim() }, `${here ? "▸" : " "}${String(number).padStart(3)} ${text}`);
}
