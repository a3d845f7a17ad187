// English texts of checks, aggregates, written tokens and other analyses; a part of en.ts.

export const analysisEn = {
  "check.title": "Checked in a second way",
  "check.same": "The model with the weights of these heads removed gives the same outputs: largest difference {apart}, allowed {allowed}.",
  "check.differs": "The model with the weights of these heads removed gives other outputs: largest difference {apart}, allowed {allowed}. Do not rely on these numbers.",
  "check.logits": "Outputs are logits; the largest is {largest}.",
  "check.not": "Not checked in a second way: {reason}.",
  "lab.sumOfSingle": "{count} heads off",
  "lab.predicted": "sum of each alone {alone}, together {together}",
  "lab.continue": "Continue the text with and without these heads",
  "lab.continued": "How the text goes on",
  "lab.firstDifference": "The texts differ from new token {number} on.",
  "lab.noDifference": "The first {count} new tokens are the same.",
} as const;
