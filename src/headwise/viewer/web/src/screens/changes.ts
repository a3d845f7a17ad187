// Screens that change or compare the model, loaded together when one of them is opened first.

export { CostScreen } from "./cost";
export { DiffScreen } from "./diff";
export { LabScreen } from "./lab";
export { OpenScreen } from "./open";
export { PruneScreen } from "./prune";
