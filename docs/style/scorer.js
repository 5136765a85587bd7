/* Order of the search's results: pages for users before those about the inside, which share most words with them. */
const first = /^(index|getting-started|faq|troubleshooting|concepts|why|tutorials\/|images|volumes|notebooks|logs|failures)/;
const last = /^(architecture|benchmarks|conformance|specification|examples\/|extending\/)/;

var Scorer = {
  score: ([page, , , , score]) => score + (first.test(page) ? 3 : 0) - (last.test(page) ? 3 : 0),
  // As in Sphinx's searchtools.js, which this replaces.
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
