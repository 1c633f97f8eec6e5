//! The router: which experts process a token, and with which weights.

use serde::{Deserialize, Serialize};

use super::experts::ExpertsSpec;
use crate::spec::NormSpec;

/// Selection and weighting of the experts of a token. Scores are f32; ties go to the lowest expert id.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RouterSpec {
    /// Norm of the router's input.
    pub norm: Option<NormSpec>,
    /// Factor on the logits.
    #[serde(default = "crate::spec::one")]
    pub logit_scale: f32,
    /// Function from logits to scores.
    pub scoring: Scoring,
    /// Whether the weights of the chosen experts are divided by their sum.
    pub normalize: bool,
    /// Factor on the weights of the chosen experts.
    pub scale: f32,
    /// Whether the weight of each expert is multiplied by its own stored factor.
    #[serde(default)]
    pub expert_scales: bool,
    /// Whether the router's logits have a bias.
    pub bias: bool,
    /// Whether a bias is added to the scores for the choice of experts but not for their weights (DeepSeek-V3).
    pub correction_bias: bool,
    /// Number of groups of consecutive experts; only experts of the best groups are chosen.
    pub groups: usize,
    /// Number of groups that experts are chosen from.
    pub groups_chosen: usize,
    /// Score of a group.
    pub group_score: GroupScore,
    /// Largest distance from the best logit, as half of a share of it, of the experts that a weight of
    /// [`Scoring::SparseMixer`] is compared with.
    #[serde(default)]
    pub jitter: f32,
    /// Whether the weight multiplies the expert's input instead of its output (Llama 4).
    #[serde(default)]
    pub weigh_input: bool,
    /// Whether the experts of a token come from a table by its id; scores only weight them (DeepSeek-V4).
    #[serde(default)]
    pub token_experts: bool,
}

/// Function from a router's logits to scores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Scoring {
    /// Softmax over all experts.
    Softmax,
    /// Sigmoid of each logit.
    Sigmoid,
    /// Square root of the softplus of each logit (DeepSeek-V4).
    SqrtSoftplus,
    /// Softmax over the chosen experts only.
    SoftmaxOfChosen,
    /// For each choice, softmax over the experts that are left and nearly as good (Phi-3.5-MoE; Liu et al. 2023).
    SparseMixer,
}

/// Score of a group of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupScore {
    /// The best score in the group.
    Max,
    /// The sum of the two best scores in the group.
    Top2,
}

/// An expert chosen for a token.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct Choice {
    pub expert: usize,
    pub weight: f32,
}

/// Chooses `experts_per_token` experts from a router's logits, best first; ties go to the lowest id. Overwrites
/// `logits`; `correction` is added to the scores only for the choice. If the experts are `given`, they are only weighted.
pub(super) fn choose(
    spec: &ExpertsSpec,
    logits: &mut [f32],
    correction: Option<&[f32]>,
    given: Option<&[f32]>,
    chosen: &mut [Choice],
) {
    let RouterSpec { scoring, normalize, scale, .. } = spec.router;
    match scoring {
        Scoring::Softmax => softmax(logits),
        Scoring::Sigmoid => logits.iter_mut().for_each(|x| *x = 1.0 / (1.0 + (-*x).exp())),
        Scoring::SqrtSoftplus => {
            logits.iter_mut().for_each(|x| *x = (x.max(0.0) + (-x.abs()).exp().ln_1p()).sqrt());
        }
        Scoring::SoftmaxOfChosen | Scoring::SparseMixer => {}
    }
    let scores = &*logits;
    let worth = |expert: usize| scores[expert] + correction.map_or(0.0, |correction| correction[expert]);
    let eligible = eligible(spec, &worth);
    for index in 0..chosen.len() {
        let left = (0..spec.experts).filter(|&expert| {
            eligible[expert / (spec.experts / spec.router.groups)]
                && chosen[..index].iter().all(|choice| choice.expert != expert)
        });
        let expert = match given {
            Some(given) => Some(given[index] as usize),
            None => best(left, &worth),
        };
        if let Some(expert) = expert {
            let weight = match scoring {
                Scoring::SparseMixer => sparse_mixer_weight(scores, expert, spec.router.jitter, &chosen[..index]),
                _ => scores[expert],
            };
            chosen[index] = Choice { expert, weight };
        }
    }
    if scoring == Scoring::SoftmaxOfChosen {
        let mut weights: Vec<f32> = chosen.iter().map(|choice| choice.weight).collect();
        softmax(&mut weights);
        chosen.iter_mut().zip(weights).for_each(|(choice, weight)| choice.weight = weight);
    }
    // If every score underflowed, the sum is 0 and the weights stay 0.
    let sum = chosen.iter().map(|choice| choice.weight).sum::<f32>() + f32::MIN_POSITIVE;
    for choice in chosen {
        choice.weight = if normalize { choice.weight / sum } else { choice.weight } * scale;
    }
}

/// Returns the weight of `best`, the best expert besides those in `chosen`: its share among the experts whose logits
/// are at most `2 * jitter * max(|logit|, best logit)` lower.
fn sparse_mixer_weight(logits: &[f32], best: usize, jitter: f32, chosen: &[Choice]) -> f32 {
    let max = logits[best];
    let near = logits.iter().enumerate().filter(|(expert, logit)| {
        let is_left = chosen.iter().all(|choice| choice.expert != *expert);
        // A NaN counts as near, so that the weight is NaN too.
        let is_far = max - **logit > 2.0 * jitter * logit.abs().max(max);
        is_left && !is_far
    });
    1.0 / near.map(|(_, logit)| (logit - max).exp()).sum::<f32>()
}

/// Returns for each group whether its experts may be chosen.
fn eligible(spec: &ExpertsSpec, worth: &impl Fn(usize) -> f32) -> Vec<bool> {
    let RouterSpec { groups, groups_chosen, group_score, .. } = spec.router;
    let mut eligible = vec![groups == groups_chosen; groups];
    if groups == groups_chosen {
        return eligible;
    }
    let size = spec.experts / groups;
    let scores: Vec<f32> = (0..groups)
        .map(|group| {
            let experts = group * size..(group + 1) * size;
            let first = best(experts.clone(), worth);
            let second = || best(experts.clone().filter(|expert| Some(*expert) != first), worth);
            let taken = [first, if group_score == GroupScore::Top2 { second() } else { None }];
            taken.into_iter().flatten().map(worth).sum()
        })
        .collect();
    for _ in 0..groups_chosen {
        let left = (0..groups).filter(|group| !eligible[*group]);
        if let Some(group) = best(left, &|group| scores[group]) {
            eligible[group] = true;
        }
    }
    eligible
}

/// Returns the first of the largest. A NaN is never larger; if the first candidate is NaN, it stays the best, and the
/// sampler reports the NaN weights.
fn best(candidates: impl Iterator<Item = usize>, worth: &impl Fn(usize) -> f32) -> Option<usize> {
    candidates.reduce(|best, candidate| if worth(candidate) > worth(best) { candidate } else { best })
}

/// Softmax in place, in f32, in sequential order.
fn softmax(x: &mut [f32]) {
    let max = x.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    x.iter_mut().for_each(|x| *x = (*x - max).exp());
    let sum: f32 = x.iter().sum();
    x.iter_mut().for_each(|x| *x /= sum);
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn chosen(router: serde_json::Value, experts_per_token: usize, logits: &[f32]) -> Vec<(usize, f32)> {
        chosen_with(router, experts_per_token, logits, None)
    }

    fn chosen_with(
        router: serde_json::Value,
        experts_per_token: usize,
        logits: &[f32],
        correction: Option<&[f32]>,
    ) -> Vec<(usize, f32)> {
        let mut all = json!({
            "scoring": "softmax", "normalize": false, "scale": 1.0, "bias": false, "correction_bias": false,
            "groups": 1, "groups_chosen": 1, "group_score": "top2"
        });
        all.as_object_mut().unwrap().extend(router.as_object().unwrap().clone());
        let spec: ExpertsSpec = serde_json::from_value(json!({
            "experts": logits.len(), "experts_per_token": experts_per_token, "router": all,
            "expert": {
                "type": "dense", "intermediate_size": 8, "activation": "silu", "gated": true, "bias": false, "clamp": null,
                "gate_scale": 1.0
            },
            "shared": null, "shared_gate": false
        }))
        .unwrap();
        let mut chosen = vec![Choice::default(); experts_per_token];
        choose(&spec, &mut logits.to_vec(), correction, None, &mut chosen);
        chosen.into_iter().map(|Choice { expert, weight }| (expert, weight)).collect()
    }

    fn experts(chosen: &[(usize, f32)]) -> Vec<usize> {
        chosen.iter().map(|(expert, _)| *expert).collect()
    }

    #[test]
    fn best_experts_come_first_and_ties_go_to_the_lowest_id() {
        let logits = [1.0, 3.0, 3.0, 0.0, 3.0];
        for scoring in ["softmax", "sigmoid", "softmax_of_chosen"] {
            assert_eq!(experts(&chosen(json!({"scoring": scoring}), 2, &logits)), [1, 2], "{scoring}");
        }
    }

    #[test]
    fn given_experts_are_weighted_by_their_scores() {
        let spec: ExpertsSpec = serde_json::from_value(json!({
            "experts": 4, "experts_per_token": 2, "shared": null, "shared_gate": false,
            "expert": {
                "type": "dense", "intermediate_size": 8, "activation": "silu", "gated": true, "bias": false, "clamp": null,
                "gate_scale": 1.0
            },
            "router": {
                "scoring": "sqrt_softplus", "normalize": true, "scale": 2.0, "bias": false, "correction_bias": false,
                "groups": 1, "groups_chosen": 1, "group_score": "top2", "token_experts": true,
            },
        }))
        .unwrap();
        let mut chosen = [Choice::default(); 2];
        let logits = [-3.0, 9.0, 0.5, 4.0];
        choose(&spec, &mut logits.clone(), None, Some(&[2.0, 0.0]), &mut chosen);
        let scores = [0.5, -3.0].map(|x: f64| x.exp().ln_1p().sqrt());
        for (choice, (expert, score)) in chosen.iter().zip([(2, scores[0]), (0, scores[1])]) {
            assert_eq!(choice.expert, expert);
            let wanted = 2.0 * score / scores.iter().sum::<f64>();
            assert!((f64::from(choice.weight) - wanted).abs() < 1e-6, "{choice:?}, {wanted}");
        }
    }

    #[test]
    fn weights_follow_the_scoring_function() {
        let logits = [1f32, 2.0, 3.0].map(f32::ln);
        let near = |found: Vec<(usize, f32)>, expected: [f32; 2]| {
            assert_eq!(experts(&found), [2, 1]);
            for ((_, weight), expected) in found.iter().zip(expected) {
                assert!((weight - expected).abs() < 1e-6, "{found:?}, {expected}");
            }
        };
        near(chosen(json!({}), 2, &logits), [3.0 / 6.0, 2.0 / 6.0]);
        near(chosen(json!({"normalize": true}), 2, &logits), [3.0 / 5.0, 2.0 / 5.0]);
        near(chosen(json!({"normalize": true, "scale": 2.5}), 2, &logits), [1.5, 1.0]);
        near(chosen(json!({"scoring": "softmax_of_chosen"}), 2, &logits), [3.0 / 5.0, 2.0 / 5.0]);
        near(chosen(json!({"scoring": "sigmoid"}), 2, &logits), [3.0 / 4.0, 2.0 / 3.0]);
    }

    #[test]
    fn sparse_mixer_compares_each_choice_with_near_experts_only() {
        // 1.9 is 5 % below 2, 1 is farther away; of those left, 1.85 is within 10 % of 1.9.
        let found = chosen(json!({"scoring": "sparse_mixer", "jitter": 0.05}), 2, &[1.0, 1.9, 2.0, 1.85]);
        assert_eq!(experts(&found), [2, 1]);
        let first = 1.0 / (1.0 + (-0.1f32).exp() + (-0.15f32).exp());
        let second = 1.0 / (1.0 + (-0.05f32).exp());
        assert!((found[0].1 - first).abs() < 1e-6 && (found[1].1 - second).abs() < 1e-6, "{found:?}");
    }

    #[test]
    fn correction_bias_affects_the_choice_and_not_the_weights() {
        let found = chosen_with(json!({"scoring": "sigmoid"}), 1, &[0.0, 1.0, 0.5], Some(&[9.0, 0.0, 0.0]));
        assert_eq!(found, [(0, 0.5)]);
    }

    #[test]
    fn experts_are_chosen_from_the_best_groups() {
        // Sums of the best two scores: 5 and 6; best scores: 5 and 3.
        let logits = [5.0, 0.0, 0.0, 3.0, 3.0, 1.0];
        let router = |score: &str| json!({"scoring": "softmax_of_chosen", "groups": 2, "groups_chosen": 1, "group_score": score});
        assert_eq!(experts(&chosen(router("top2"), 2, &logits)), [3, 4]);
        assert_eq!(experts(&chosen(router("max"), 2, &logits)), [0, 1]);
    }

    #[test]
    fn nan_logits_still_choose_experts() {
        let found = chosen(json!({"normalize": true}), 2, &[f32::NAN; 4]);
        assert_eq!(experts(&found), [0, 1]);
        assert!(found.iter().all(|(_, weight)| weight.is_nan()));
    }
}
