// Screens that show the model, loaded together when one of them is opened first.

export { ClassifyScreen } from "./classify";
export { HeadScreen } from "./head";
export { SimilarityScreen } from "./similarity";
export { StepsScreen } from "./steps";
export { TextScreen } from "./text";
