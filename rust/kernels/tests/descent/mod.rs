//! Naive f64 implementation of GPTQ followed by descent over groups, for int4.

use crate::hessian::{inverse, upper_cholesky};

const GROUP: usize = 16;
const SUPER: usize = 256;
const SWEEPS: usize = 2;

/// Codes of a group with their sub-scale.
#[derive(Clone)]
struct Coded {
    codes: Vec<f64>,
    scale: f64,
    /// Errors times the factor of the cost.
    residuals: Vec<f64>,
}

impl Coded {
    fn loss(&self) -> f64 {
        self.residuals.iter().map(|residual| residual * residual).sum()
    }
}

/// Cost `e -> e A e^T` of the errors of consecutive inputs, as the factor U of the inverse of A: `A^-1 = U^T U`, `[n][n]`.
pub struct Cost {
    u: Vec<f64>,
    n: usize,
}

impl Cost {
    pub fn new(a: &[f64], n: usize) -> Self {
        Self { u: upper_cholesky(&inverse(a.to_vec(), n), n), n }
    }

    /// Rounds the inputs from `first` on one after the other.
    fn round(&self, first: usize, mut targets: Vec<f64>, scale: f64, block_scale: f64) -> Coded {
        let step = scale * block_scale;
        let (mut codes, mut residuals) = (Vec::new(), Vec::new());
        for k in 0..GROUP {
            let row = &self.u[(first + k) * self.n + first..];
            let code = if step > 0.0 { (targets[k] / step).round_ties_even().clamp(-8.0, 7.0) } else { 0.0 };
            let residual = (targets[k] - code * step) / row[k];
            (k + 1..GROUP).for_each(|j| targets[j] -= residual * row[j]);
            codes.push(code);
            residuals.push(residual);
        }
        Coded { codes, scale, residuals }
    }

    /// Rounds with sub-scales next to `scale`.
    fn best(&self, first: usize, targets: &[f64], scale: f64, block_scale: f64) -> Coded {
        let near = [0.0, -1.0, 1.0].map(|offset| (scale + offset).clamp(0.0, 15.0));
        let tried = near.map(|scale| self.round(first, targets.to_vec(), scale, block_scale));
        tried.into_iter().min_by(|a, b| a.loss().total_cmp(&b.loss())).unwrap()
    }

    /// Returns the scale of a group with the least squared error, weighed by the importance of inputs.
    fn ideal_scale(&self, first: usize, targets: &[f64]) -> f64 {
        let base = targets.iter().fold(0.0f64, |peak, target| peak.max(target.abs())) / 7.0;
        let candidates = (0..15).map(|index| {
            let step = base * (0.62 + (1.15 - 0.62) * f64::from(index) / 14.0);
            let (mut squares, mut products) = (0.0, 0.0);
            for (k, target) in targets.iter().enumerate() {
                let code = (target / step).round_ties_even().clamp(-8.0, 7.0);
                let importance = self.u[(first + k) * (self.n + 1)].powi(-2);
                squares += importance * code * code;
                products += importance * code * target;
            }
            (products * products / squares, products / squares)
        });
        candidates.max_by(|a, b| a.0.total_cmp(&b.0)).unwrap().1
    }
}

/// Returns the losses of a row of rotated weights with the Hessian `h`: after GPTQ and after descent. `h_cost` is the
/// cost of `h`, `block_scales` are those of the row.
pub fn losses(weights: &[f64], h: &[f64], h_cost: &Cost, block_scales: &[f64]) -> [f64; 2] {
    let n = weights.len();
    let mut targets = weights.to_vec();
    let mut groups: Vec<Coded> = Vec::new();
    for first in (0..n).step_by(GROUP) {
        let (now, block_scale) = (&targets[first..first + GROUP], block_scales[first / SUPER]);
        let nearest = (h_cost.ideal_scale(first, now) / block_scale).round_ties_even().clamp(0.0, 15.0);
        let coded = h_cost.best(first, now, nearest, block_scale);
        for (k, residual) in coded.residuals.iter().enumerate() {
            (first + GROUP..n).for_each(|j| targets[j] -= residual * h_cost.u[(first + k) * n + j]);
        }
        groups.push(coded);
    }
    let errors = |groups: &[Coded]| -> Vec<f64> {
        let values = groups.iter().enumerate().flat_map(|(index, group)| {
            let step = group.scale * block_scales[index * GROUP / SUPER];
            group.codes.iter().map(move |code| code * step)
        });
        weights.iter().zip(values).map(|(weight, value)| weight - value).collect()
    };
    let product = |errors: &[f64], k: usize| errors.iter().zip(&h[k * n..]).map(|(e, h)| e * h).sum::<f64>();
    let loss = |errors: &[f64]| (0..n).map(|k| errors[k] * product(errors, k)).sum::<f64>();
    let greedy = loss(&errors(&groups));

    for first in (0..SWEEPS).flat_map(|_| (0..n).step_by(GROUP)) {
        let old = errors(&groups);
        let block: Vec<f64> = (first..first + GROUP).flat_map(|k| h[k * n + first..][..GROUP].to_vec()).collect();
        let cost = Cost::new(&block, GROUP);
        let gradient: Vec<f64> = (first..first + GROUP).map(|k| product(&old, k)).collect();
        let inverse = inverse(block, GROUP);
        let targets: Vec<f64> = (0..GROUP)
            .map(|k| {
                let change = (0..GROUP).map(|j| inverse[k * GROUP + j] * gradient[j]).sum::<f64>();
                weights[first + k] - old[first + k] + change
            })
            .collect();
        let group = &mut groups[first / GROUP];
        let improved = cost.best(0, &targets, group.scale, block_scales[first / SUPER]);
        let before = std::mem::replace(group, improved);
        if loss(&errors(&groups)) >= loss(&old) {
            groups[first / GROUP] = before;
        }
    }
    [greedy, loss(&errors(&groups))]
}
