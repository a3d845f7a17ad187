// Names of the measures and of the classes of heads, in the languages of the page.

import { language } from "../state";

/** What a measure counts in English, and its name and meaning in Chinese. The English name is that of files and commands. */
const WORDS: Record<string, { en: string; zh: readonly [name: string, meaning: string] }> = {
  entropy: { en: "entropy of a row, in nats", zh: ["熵", "一行权重的熵，单位为纳特"] },
  breadth: { en: "exp(entropy) over the number of allowed keys", zh: ["宽度", "exp(熵) 与可见键数之比"] },
  confidence: { en: "largest weight of a row", zh: ["置信度", "一行中的最大权重"] },
  distance: { en: "mean number of tokens between query and key", zh: ["距离", "查询与键之间的平均词元数"] },
  sink: { en: "weight on sinks: tokens that take the weight that a head does not need elsewhere, such as the first", zh: ["汇点", "汇点上的权重：汇点是吸收多余注意力的词元，如第一个词元"] },
  first: { en: "weight on the first token", zh: ["首个词元", "第一个词元上的权重"] },
  separator: { en: "weight on separators", zh: ["分隔符", "分隔符上的权重"] },
  punctuation: { en: "weight on punctuation, sinks left out", zh: ["标点", "标点上的权重（不计汇点）"] },
  previous: { en: "weight on the previous token, sinks left out", zh: ["前一个", "前一个词元上的权重（不计汇点）"] },
  self: { en: "weight on the token itself, sinks left out", zh: ["自身", "词元自身上的权重（不计汇点）"] },
  next: { en: "weight on the next token, sinks left out", zh: ["后一个", "后一个词元上的权重（不计汇点）"] },
  offset: { en: "share of rows whose largest weight is at one distance", zh: ["固定距离", "最大权重落在同一距离上的行所占比例"] },
  peak: { en: "distance at which most rows have their largest weight", zh: ["峰值距离", "多数行最大权重所在的距离"] },
  positional_share: { en: "share of the variance of weights that distance explains", zh: ["位置占比", "权重方差中由距离解释的比例"] },
  support50: { en: "share of keys that hold half of a row", zh: ["50 % 键占比", "占一行一半权重的键的比例"] },
  support90: { en: "share of keys that hold 90 % of a row", zh: ["90 % 键占比", "占一行 90 % 权重的键的比例"] },
  support95: { en: "share of keys that hold 95 % of a row", zh: ["95 % 键占比", "占一行 95 % 权重的键的比例"] },
  duplicate: { en: "weight on other occurrences of the same token", zh: ["重复词元", "同一词元其他出现处的权重"] },
  induction: { en: "weight on tokens after an earlier occurrence of the same token", zh: ["归纳", "同一词元先前出现处之后词元上的权重"] },
  rare: { en: "share of rows whose largest weight is on the rarest token", zh: ["最罕见词元", "最大权重落在最罕见词元上的行所占比例"] },
  patch_distance: { en: "distance between query and key, in patches", zh: ["图像块距离", "查询与键之间的距离，单位为图像块"] },
  same_patch: { en: "weight on the patch itself", zh: ["同一图像块", "图像块自身上的权重"] },
  neighbours: { en: "weight on the 8 patches around the query", zh: ["相邻图像块", "查询周围 8 个图像块上的权重"] },
  same_row: { en: "weight on other patches of the same row", zh: ["同行", "同一行其他图像块上的权重"] },
  same_column: { en: "weight on other patches of the same column", zh: ["同列", "同一列其他图像块上的权重"] },
  importance: { en: "change of the loss when the head is ablated alone", zh: ["重要性", "单独消融该头时损失的变化"] },
  divergence: { en: "Jensen-Shannon divergence of the two runs that the screen Diff compares, in nats", zh: ["散度", "“对比”页所比较的两次运行之间的 Jensen-Shannon 散度，单位为纳特"] },
  "largest change": { en: "largest change of a weight between the two runs that the screen Diff compares", zh: ["最大变化", "“对比”页所比较的两次运行之间权重的最大变化"] },
  "alignment input": { en: "1 minus the alignment error rate of the row that reads a target word", zh: ["对齐（读入）", "读入目标词的行：1 减去对齐错误率"] },
  "alignment input precision": { en: "precision of the alignment of the row that reads a target word", zh: ["对齐精确率（读入）", "读入目标词的行：对齐的精确率"] },
  "alignment input recall": { en: "recall of the alignment of the row that reads a target word", zh: ["对齐召回率（读入）", "读入目标词的行：对齐的召回率"] },
  "alignment target": { en: "1 minus the alignment error rate of the row that predicts a target word", zh: ["对齐（预测）", "预测目标词的行：1 减去对齐错误率"] },
  "alignment target precision": { en: "precision of the alignment of the row that predicts a target word", zh: ["对齐精确率（预测）", "预测目标词的行：对齐的精确率"] },
  "alignment target recall": { en: "recall of the alignment of the row that predicts a target word", zh: ["对齐召回率（预测）", "预测目标词的行：对齐的召回率"] },
};

/** The name of a measure for readers. */
export function measureName(name: string): string {
  return (language.value === "zh" && WORDS[name]?.zh[0]) || name;
}

/** What a measure counts, where the page knows it. */
export function measureMeaning(name: string): string | undefined {
  return language.value === "zh" ? WORDS[name]?.zh[1] : WORDS[name]?.en;
}

const CLASS_WORDS: Record<string, string> = {
  sink: "汇点",
  separator: "分隔符",
  previous: "前一词元",
  self: "自身",
  next: "后一词元",
  duplicate: "重复词元",
  induction: "归纳",
  punctuation: "标点",
  "rare-token": "罕见词元",
  broad: "宽泛",
  alignment: "对齐",
  neighbour: "相邻图像块",
  row: "同行",
  column: "同列",
  positional: "位置",
  syntactic: "句法",
};

/** The name of a head's class for readers, such as "previous", "offset -2" or "unclear". */
export function classWord(name: string | undefined): string {
  if (!name || name === "unclear") return language.value === "zh" ? "不明" : "unclear";
  if (language.value === "en") return name;
  return CLASS_WORDS[name] ?? name.replace(/^offset /, "距离 ");
}
