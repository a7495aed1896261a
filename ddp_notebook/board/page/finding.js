// The finding: what is wrong, the code of each group of ranks, the fix. The rest is folded.

/** `act` runs a magic. What the user has unfolded stays so when findings change. */
function drawFindings(element, findings, act) {
  if (element.firstChild) element.unfolded = Boolean(element.querySelector(".ddpb-evidence")?.open);
  show(element, findings, () => {
    const [first, ...others] = findings;
    return first && [findingBox(first, others, act, element)];
  });
}

function findingBox(finding, others, act, slot) {
  const columns = finding.columns ?? [];
  return make(
    "section",
    { class: `ddpb-finding ddpb-${finding.passing ? "warn" : "bad"}` },
    sentenceOf(finding),
    columns.length > 0 && make("div", { class: "ddpb-sides" }, columns.slice(0, 2).map(columnBox)),
    remedyOf(finding, act),
    finding.patch.length > 0 && make("pre", { class: "ddpb-patch" }, finding.patch.map(patchLine)),
    make(
      "details",
      { class: "ddpb-evidence", open: slot.unfolded },
      make("summary", {}, others.length ? `Evidence and ${others.length} more ${others.length === 1 ? "finding" : "findings"}` : "Evidence", " ", categoryOf(finding)),
      finding.waiting && make("div", { class: "ddpb-waiting" }, finding.waiting),
      columns.length > 2 && make("div", { class: "ddpb-sides" }, columns.slice(2).map(columnBox)),
      finding.evidence.length > 0 && make("ul", {}, finding.evidence.map((fact) => make("li", {}, prose(fact)))),
      others.map((other) => make("div", { class: `ddpb-further ddpb-${other.passing ? "warn" : "bad"}` }, sentenceOf(other), categoryOf(other), remedyOf(other, act))),
    ),
  );
}

/** A sentence, in which code stands between backticks. */
function prose(text) {
  const parts = text.split("`");
  return parts.length % 2 ? parts.map((part, at) => (at % 2 ? make("code", {}, part) : part)) : text;
}

function sentenceOf(finding) {
  return make(
    "div",
    { class: "ddpb-sentence" },
    sign(finding.symbol),
    make("b", {}, prose(finding.sentence)),
  );
}

const categoryOf = (finding) => make("span", { class: "ddpb-category" }, finding.passing ? "busy, not stuck" : finding.category);

function remedyOf(finding, act) {
  return make(
    "div",
    { class: "ddpb-remedy" },
    make("span", { class: "ddpb-todo" }, "Fix"),
    make("span", { class: "ddpb-fix" }, prose(finding.remedy)),
    copyButton(finding.remedy, "the fix"),
    finding.magics.map((magic) => make("button", { class: "ddpb-small ddpb-run", type: "button", onclick: () => act(magic) }, "Run ", make("code", {}, magic))),
  );
}

/** A line of a diff: `-old`, `+new` or ` kept`. */
const patchLine = (line) => make("div", { class: { "+": "ddpb-added", "-": "ddpb-removed" }[line[0]] }, line);

/** Where ranks are: the lines that are marked, each with what is said of it. */
function columnBox({ who, site, lines }) {
  const source = lines.find(([, , kind]) => kind === "at")?.[1];
  return make("figure", { class: "ddpb-side" }, make("figcaption", { title: `${who} · ${site}` }, make("b", {}, `${who} `), siteLink(site, source)), make("pre", {}, lines.map(codeLine)));
}

function codeLine([number, text, kind, label]) {
  return make("div", { class: kind && `ddpb-on-${kind}` }, `${String(number || "⋮").padStart(3)} ${text}`, label && make("i", {}, `  ◂ ${label}`));
}
