// Search results: the first guides, then other guides, the API and special pages, last the pages for
// developers.
var Scorer = {
  objNameMatch: 3,
  objPartialMatch: 2,
  objPrio: {0: 0, 1: 0, 2: -2},
  objPrioDefault: 0,
  title: 40,
  partialTitle: 20,
  term: 5,
  partialTerm: 2,
  score: ([page, , , , score]) => {
    if (/^(architecture|contributing|changelog)$/.test(page)) return score - 100;
    if (/^(derivatives|from-the-tutorial|notation|versions)$/.test(page)) return score - 30;
    if (/^(drop-in|performance|training)$/.test(page)) return score + 2;
    return /-api$/.test(page) ? score - 3 : score;
  },
};
