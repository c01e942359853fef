// Search results: guides before the API reference.
var Scorer = {
  objNameMatch: 3,
  objPartialMatch: 2,
  objPrio: {0: 0, 1: 0, 2: -2},
  objPrioDefault: 0,
  title: 40,
  partialTitle: 20,
  term: 5,
  partialTerm: 2,
};
