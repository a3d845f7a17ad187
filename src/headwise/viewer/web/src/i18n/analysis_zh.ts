// Chinese texts of checks, aggregates, written tokens and other analyses: the same keys as in analysis_en.ts.

import type { analysisEn } from "./analysis_en";

export const analysisZh: Record<keyof typeof analysisEn, string> = {
  "check.title": "第二种方法的核对",
  "check.same": "移除这些头的权重之后，模型的输出相同：最大差异 {apart}，允许 {allowed}。",
  "check.differs": "移除这些头的权重之后，模型的输出不同：最大差异 {apart}，允许 {allowed}。请勿采信这些数字。",
  "check.logits": "输出是 logits，最大值为 {largest}。",
  "check.not": "未用第二种方法核对：{reason}。",
  "lab.sumOfSingle": "已关 {count} 个头",
  "lab.predicted": "单独影响之和 {alone}，一起关掉 {together}",
  "lab.continue": "比较有无这些头时文本如何续写",
  "lab.continued": "文本的续写",
  "lab.firstDifference": "从第 {number} 个新词元起不同。",
  "lab.noDifference": "前 {count} 个新词元相同。",
};
