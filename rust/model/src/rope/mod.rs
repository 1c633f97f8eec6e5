//! Rotary position embeddings (RoPE; Su et al. 2021) and their scaling to longer contexts.
//!
//! A scaling is one file with a function from the spec to frequencies, and one line in [`RopeScaling`].

mod dynamic;
mod linear;
mod llama3;
mod longrope;
mod proportional;
mod yarn;

use serde::{Deserialize, Serialize};

use crate::limits::{SpecError, require};

pub use dynamic::Dynamic;
pub use linear::Linear;
pub use llama3::Llama3;
pub use longrope::LongRope;
pub use proportional::Proportional;
pub use yarn::Yarn;

/// Rotary embedding: which elements of a head it rotates, its frequencies, and its scaling.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct RopeSpec {
    /// Base of the frequencies: `theta^(-2i / rotary_dim)`.
    pub theta: f64,
    /// Number of leading elements of a head that are rotated; even.
    pub rotary_dim: usize,
    /// Whether a pair is two neighbours (GPT-J) or elements `i` and `i + rotary_dim / 2` (GPT-NeoX, Llama).
    pub interleaved: bool,
    /// Scaling to contexts longer than the model was trained on.
    pub scaling: RopeScaling,
}

/// RoPE scaling: how frequencies change with the context.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum RopeScaling {
    /// No scaling.
    None {},
    /// Linear scaling: positions are divided by a factor.
    Linear(Linear),
    /// Dynamic NTK: the base grows with the length.
    Dynamic(Dynamic),
    /// YaRN: high frequencies are kept, low ones are divided, with a ramp in between.
    Yarn(Yarn),
    /// Scaling of Llama 3.1, by wavelength.
    Llama3(Llama3),
    /// LongRoPE: each frequency has its own divisor, from one of two sets.
    #[serde(rename = "longrope")]
    LongRope(LongRope),
    /// Proportional: only the pairs of high frequency are rotated.
    Proportional(Proportional),
}

impl RopeSpec {
    pub(crate) fn check(&self, path: &str) -> Result<(), SpecError> {
        require(&format!("{path}.theta"), self.theta, self.theta.is_finite() && self.theta > 1.0, || {
            "finite and > 1".to_owned()
        })?;
        let even = self.rotary_dim >= 2 && self.rotary_dim.is_multiple_of(2);
        require(&format!("{path}.rotary_dim"), self.rotary_dim, even, || "even and at least 2".to_owned())?;
        let path = format!("{path}.scaling");
        match &self.scaling {
            RopeScaling::None {} => Ok(()),
            RopeScaling::Linear(scaling) => scaling.check(&path),
            RopeScaling::Dynamic(scaling) => scaling.check(&path),
            RopeScaling::Yarn(scaling) => scaling.check(&path),
            RopeScaling::Llama3(scaling) => scaling.check(&path),
            RopeScaling::LongRope(scaling) => scaling.check(&path, self.rotary_dim),
            RopeScaling::Proportional(scaling) => scaling.check(&path, self.rotary_dim),
        }
    }

    /// Returns whether the rotation of a position depends on the sequence's length.
    pub(crate) fn depends_on_length(&self) -> bool {
        matches!(self.scaling, RopeScaling::Dynamic(_) | RopeScaling::LongRope(_))
    }

    /// Returns the number of leading positions that are rotated alike in every sequence with a prompt of at most
    /// `prompt_len` tokens.
    pub(crate) fn shareable_tokens(&self, prompt_len: usize) -> usize {
        match &self.scaling {
            RopeScaling::Dynamic(scaling) => scaling.shareable_tokens(prompt_len),
            RopeScaling::LongRope(scaling) => scaling.shareable_tokens(prompt_len),
            _ => usize::MAX,
        }
    }

    /// Returns the radians per position for each pair, for a sequence of `length` tokens.
    fn frequencies(&self, length: usize) -> Vec<f32> {
        let plain = |theta: f64| {
            let dim = self.rotary_dim as f64;
            (0..self.rotary_dim / 2).map(move |i| theta.powf(-2.0 * i as f64 / dim))
        };
        let scaled: Vec<f64> = match &self.scaling {
            RopeScaling::None {} => plain(self.theta).collect(),
            RopeScaling::Linear(scaling) => plain(self.theta).map(|f| scaling.scale(f)).collect(),
            RopeScaling::Dynamic(scaling) => plain(scaling.theta(self.theta, self.rotary_dim, length)).collect(),
            RopeScaling::Yarn(scaling) => {
                let ramp = scaling.ramp(self.theta, self.rotary_dim);
                plain(self.theta).enumerate().map(|(i, f)| scaling.scale(f, ramp, i)).collect()
            }
            RopeScaling::Llama3(scaling) => plain(self.theta).map(|f| scaling.scale(f)).collect(),
            RopeScaling::LongRope(scaling) => {
                plain(self.theta).zip(scaling.factors(length)).map(|(f, factor)| f / factor).collect()
            }
            RopeScaling::Proportional(scaling) => {
                plain(self.theta).enumerate().map(|(i, f)| scaling.scale(f, i)).collect()
            }
        };
        scaled.into_iter().map(|frequency| frequency as f32).collect()
    }

    /// Returns the factor on cosine and sine, for a sequence of `length` tokens.
    fn attention_factor(&self, length: usize) -> f64 {
        match &self.scaling {
            RopeScaling::Yarn(scaling) => scaling.attention_factor,
            RopeScaling::LongRope(scaling) => scaling.factor_at(length),
            _ => 1.0,
        }
    }
}

/// Cosines and sines for the rows of a batch, reused from step to step.
#[derive(Debug, Default)]
pub struct RopeRows {
    /// `[rows, rotary_dim / 2]`
    pub cos: Vec<f32>,
    /// `[rows, rotary_dim / 2]`
    pub sin: Vec<f32>,
}

impl RopeRows {
    /// Fills the tables for rows of (position, prompt length).
    ///
    /// Position i is rotated as in a sequence of max(prompt length, i + 1) tokens, which is what a model computes that
    /// prefills its prompt in one step and then decodes token by token. The angle is a product of two f32, as in the
    /// reference implementation.
    pub fn fill(&mut self, spec: &RopeSpec, rows: impl Iterator<Item = (usize, usize)>) {
        self.cos.clear();
        self.sin.clear();
        let mut length = 0;
        let (mut factor, mut frequencies) = (spec.attention_factor(length), spec.frequencies(length));
        for (position, prompt_len) in rows {
            let row_length = prompt_len.max(position + 1);
            if spec.depends_on_length() && row_length != length {
                length = row_length;
                (factor, frequencies) = (spec.attention_factor(length), spec.frequencies(length));
            }
            for frequency in &frequencies {
                let angle = f64::from(position as f32 * frequency);
                self.cos.push((angle.cos() * factor) as f32);
                self.sin.push((angle.sin() * factor) as f32);
            }
        }
    }
}

fn positive(field: &str, value: f64) -> Result<(), SpecError> {
    require(field, value, value.is_finite() && value > 0.0, || "finite and > 0".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(scaling: RopeScaling) -> RopeSpec {
        RopeSpec { theta: 10_000.0, rotary_dim: 8, interleaved: false, scaling }
    }

    #[test]
    fn unscaled_frequencies_fall_from_one() {
        assert_eq!(spec(RopeScaling::None {}).frequencies(7), [1.0, 0.1, 0.01, 0.001]);
    }

    #[test]
    fn linear_divides_every_frequency() {
        let scaled = spec(RopeScaling::Linear(Linear { factor: 4.0 })).frequencies(7);
        assert_eq!(scaled, [0.25, 0.025, 0.0025, 0.00025]);
    }

    #[test]
    fn proportional_rotates_the_first_pairs_with_the_frequencies_of_the_whole_head() {
        let scaling = Proportional { rotated_pairs: 2, factor: 2.0 };
        let scaled = spec(RopeScaling::Proportional(scaling)).frequencies(7);
        assert_eq!(scaled, [0.5, 0.05, 0.0, 0.0]);
        let scaling = Proportional { rotated_pairs: 5, factor: 1.0 };
        let error = spec(RopeScaling::Proportional(scaling)).check("ropes[0]").unwrap_err();
        assert!(error.to_string().contains("ropes[0].scaling.rotated_pairs"), "{error}");
    }

    #[test]
    fn dynamic_is_plain_within_the_trained_length_and_stretches_beyond_it() {
        let dynamic = spec(RopeScaling::Dynamic(Dynamic { factor: 2.0, original_max_position_embeddings: 32 }));
        let plain = spec(RopeScaling::None {});
        assert_eq!(dynamic.frequencies(32), plain.frequencies(32));
        // theta * (2 * 64 / 32 - 1)^(8 / 6), as in the formula.
        let theta = 10_000.0 * 3f64.powf(8.0 / 6.0);
        let last = dynamic.frequencies(64)[3];
        assert!((f64::from(last) - theta.powf(-6.0 / 8.0)).abs() < 1e-9);
    }

    #[test]
    fn dynamic_rows_of_a_prompt_share_the_prompts_length() {
        let dynamic = spec(RopeScaling::Dynamic(Dynamic { factor: 2.0, original_max_position_embeddings: 4 }));
        let (mut whole, mut tail) = (RopeRows::default(), RopeRows::default());
        whole.fill(&dynamic, (0..10).map(|position| (position, 9)));
        tail.fill(&dynamic, (5..10).map(|position| (position, 9)));
        assert_eq!(whole.cos[5 * 4..], tail.cos[..]);
        let mut longer = RopeRows::default();
        longer.fill(&dynamic, [(5, 20)].into_iter());
        assert_ne!(whole.cos[5 * 4..6 * 4], longer.cos[..]);
    }

    #[test]
    fn llama3_keeps_short_waves_and_divides_long_ones() {
        let llama3 =
            Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_max_position_embeddings: 32 };
        let scaled = spec(RopeScaling::Llama3(llama3)).frequencies(1);
        assert_eq!(scaled[0], 1.0);
        assert_eq!(scaled[3], 0.001 / 8.0);
    }

    #[test]
    fn yarn_scales_cosines_by_its_attention_factor() {
        let yarn = Yarn {
            factor: 4.0,
            original_max_position_embeddings: 64,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: 1.5,
            truncate: true,
        };
        let mut rows = RopeRows::default();
        rows.fill(&spec(RopeScaling::Yarn(yarn)), [(0, 1)].into_iter());
        assert_eq!(rows.cos, [1.5; 4]);
    }

    #[test]
    fn longrope_has_its_own_factor_beyond_the_original_context() {
        let longrope = LongRope {
            short_factor: vec![1.0; 4],
            long_factor: vec![1.0; 4],
            original_max_position_embeddings: 4,
            attention_factor: 1.5,
            long_attention_factor: Some(2.0),
        };
        let mut rows = RopeRows::default();
        rows.fill(&spec(RopeScaling::LongRope(longrope.clone())), [(0, 4), (0, 5)].into_iter());
        assert_eq!(rows.cos, [[1.5; 4], [2.0; 4]].concat());
        let same = LongRope { long_attention_factor: None, ..longrope };
        rows.fill(&spec(RopeScaling::LongRope(same)), [(0, 5)].into_iter());
        assert_eq!(rows.cos, [1.5; 4]);
    }

    #[test]
    fn a_factor_of_zero_or_nan_is_refused_by_name() {
        for factor in [0.0, -1.0, f64::NAN, f64::INFINITY] {
            let error = spec(RopeScaling::Linear(Linear { factor })).check("ropes[0]").unwrap_err();
            assert!(error.to_string().contains("ropes[0].scaling.factor"), "{error}");
        }
    }
}
