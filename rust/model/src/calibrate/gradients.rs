//! Gradients of the outputs of the exact model's linear layers, for some of the calibration's sequences.
//!
//! They are computed by a backward pass. The loss is the negative log-probability of a token that is drawn from the model's own distribution. The mean of `g g^T`
//! over its gradients g is then the Hessian of the divergence that an error causes (Fisher information).

use std::cell::RefCell;
use std::collections::BTreeMap;

use ferrule_kernels::arch::LANES;
use ferrule_kernels::{AllocError, Exec, OutputGradients, machine};
use half::bf16;
use half::slice::HalfFloatSliceExt;

use super::inputs::CalibratedSite;
use super::pass::{Pass, State};
use super::{Sequences, count, float_bytes, in_memory};
use crate::layer::{
    AdapterRows, TRANSPOSED_ROWS, for_rows, has_gradient, linear, linear_gradient, norm_gradient, norm_in_place,
    scale_unless_one,
};
use crate::lm_head::{LmHeadWeights, multiply_lm_head};
use crate::quantization::Quantization;
use crate::random::RandomMatrix;
use crate::spec::{LmHeadSpec, ModelSpec};
use crate::weights::{Layer, Linear, LoadError, Loader, Measure, Norm, Source, TokenTable};

/// Maximum number of tokens: twice as many lower the divergence of the embedded model by less than 1 %.
const MAX_TOKENS: usize = 1 << 15;

/// Maximum number of tokens of a sequence, since the work of attention grows with its square.
const MAX_SEQUENCE: usize = 2048;

/// Maximum bytes of the gradients.
const MAX_BYTES: usize = 384 << 20;

/// Number of tokens for each row of the parts of a matrix whose errors compensate each other. With three, the divergence of
/// the embedded model grows instead of shrinking.
const TOKENS_PER_ROW: usize = 16;

/// Maximum number of panels of such a part.
const MAX_PART_PANELS: usize = 32;

/// Maximum number of logits at a time.
const MAX_LOGITS: usize = 1 << 24;

/// Maximum number of rows whose logits are computed at a time.
const MAX_LOGIT_ROWS: usize = 512;

/// Gradients of the loss with respect to the hidden states after each layer of the exact model.
pub(super) struct Gradients {
    /// Indices of the sequences.
    sequences: Vec<usize>,
    /// Maximum number of panels whose errors compensate each other.
    part_panels: usize,
    /// By layer: `[tokens, hidden_size]`.
    after: Vec<Vec<bf16>>,
}

impl Gradients {
    /// Returns the indices of the sequences whose gradients are computed, and the panels of a part of a matrix: none for
    /// models whose gradients are unknown.
    fn plan(spec: &ModelSpec, all: &[Vec<u32>]) -> (Vec<usize>, usize) {
        let is_known = spec.streams.is_none() && spec.lm_head.is_some() && spec.layers.iter().all(has_gradient);
        let token_bytes = spec.layers.len() * spec.hidden_size * size_of::<bf16>();
        let most = MAX_TOKENS.min(MAX_BYTES / token_bytes.max(1));
        // Sequences spread evenly over all, as far as there is room.
        let number = most.min(count(all)) * all.len() / count(all).max(1);
        let (mut chosen, mut tokens) = (Vec::new(), 0);
        for index in (0..number).map(|index| index * all.len() / number) {
            let length = all[index].len();
            if length <= MAX_SEQUENCE && tokens + length <= most {
                chosen.push(index);
                tokens += length;
            }
        }
        let part_panels = (tokens / TOKENS_PER_ROW / LANES).min(MAX_PART_PANELS);
        // A part of one panel has nothing to compensate.
        if is_known && part_panels > 1 { (chosen, part_panels) } else { (Vec::new(), 0) }
    }

    /// Runs the forward and backward pass of the exact model over some of the sequences. Returns `None` for models whose gradients are unknown, and
    /// if there are too few tokens. Calls `work` with each part of the work that was done; together they are 1.
    pub fn new(
        exec: Exec<'_>,
        spec: &ModelSpec,
        source: Source<'_>,
        (all, tables): (&[Vec<u32>], &[TokenTable]),
        work: &mut dyn FnMut(f64),
    ) -> Result<Option<Self>, LoadError> {
        let (sequences, part_panels) = Self::plan(spec, all);
        if sequences.is_empty() {
            return Ok(None);
        }
        let some: Vec<Vec<u32>> = sequences.iter().map(|index| all[*index].clone()).collect();
        let [layers, ends] =
            [Quantization::EXACT, Quantization::BF16].map(|quantization| Loader::new(spec, source, quantization));
        let load = |index: usize| layers.layer(&mut in_memory(exec, &mut |_, _| ()), index, &spec.layers[index], &[]);
        let share = 1.0 / (2 * spec.layers.len()) as f64;

        let embedding = ends.embedding(&mut in_memory(exec, &mut |_, _| ()))?;
        let mut pass = Pass::new(exec, spec, &some, &embedding, tables, None)?;
        pass.state.hidden.narrow();
        let mut before = Vec::with_capacity(spec.layers.len());
        for index in 0..spec.layers.len() {
            before.push(pass.state.hidden.clone());
            pass.advance(&load(index)?, index, &mut || ())?;
            work(share);
        }

        let hidden = pass.take_hidden(None)?;
        let mut gradient = Output::load(spec, &ends, exec)?.gradient(exec, embedding.tokens.as_ref(), &hidden)?;
        drop((embedding, hidden));
        let mut after = vec![Vec::new(); spec.layers.len()];
        let places: Vec<_> = pass.places().map(|(_, rows)| rows).collect();
        for (index, before) in before.into_iter().enumerate().rev() {
            after[index] = gradient.iter().copied().map(bf16::from_f32).collect();
            if index > 0 {
                let layer = load(index)?;
                for (number, rows) in places.iter().enumerate() {
                    let (hidden, gradient) = (before.read(rows.clone()), &mut gradient[rows.clone()]);
                    pass.gradient((&layer, index), number, &hidden, gradient, &mut |_, _, _| Ok(()))?;
                }
            }
            work(share);
        }
        Ok(Some(Self { sequences, part_panels, after }))
    }

    /// Returns the sums of the gradients of the outputs of a layer's corrected linear layers, by site. `exact` has the
    /// hidden states of all sequences before the layer.
    pub fn of_layer(
        &self,
        pass: &mut Pass<'_>,
        exact: &State,
        (layer, index): (&Layer, usize),
        linears: &[CalibratedSite],
    ) -> Result<BTreeMap<usize, OutputGradients>, LoadError> {
        let zeroed = |linear: &CalibratedSite| {
            let sums = OutputGradients::zeroed(&linear.bands, self.part_panels);
            let sums = sums.map_err(|AllocError { bytes }| LoadError::Memory {
                what: "calibration, for the gradients of a linear layer's outputs,",
                needs: bytes,
                available: machine::available_memory(),
            });
            Ok((linear.site, sums?))
        };
        let corrected = linears.iter().filter(|linear| linear.corrects);
        let mut sums: BTreeMap<_, _> = corrected.map(zeroed).collect::<Result<_, LoadError>>()?;
        let places: Vec<_> = pass.places().map(|(_, rows)| rows).collect();
        let mut left = self.after[index].as_slice();
        for number in &self.sequences {
            let hidden = exact.hidden.read(places[*number].clone());
            let (now, later) = left.split_at(hidden.len());
            left = later;
            pass.gradient((layer, index), *number, &hidden, &mut now.to_f32_vec(), &mut |exec, linear, gradients| {
                sums.get_mut(&linear.site).map_or(Ok(()), |sums| Ok(sums.add(exec, gradients)?))
            })?;
        }
        Ok(sums)
    }
}

/// Memory that gradients take.
pub(super) struct GradientBytes {
    /// Bytes of the gradients.
    pub held: u64,
    /// Bytes that computing them takes, besides a layer in full precision and what running it takes.
    pub computing: u64,
    /// Number of tokens of the longest sequence.
    longest: usize,
    part_panels: usize,
}

impl GradientBytes {
    /// Calculates the bytes; `None` if there are no gradients. `exact_ends` is the loader of the exact model's embedding and
    /// lm_head.
    pub fn new(spec: &ModelSpec, exact_ends: &Loader<'_>, sequences: Sequences<'_>) -> Result<Option<Self>, LoadError> {
        let (chosen, part_panels) = Gradients::plan(spec, sequences.tokens);
        if !sequences.corrects || chosen.is_empty() {
            return Ok(None);
        }
        let lengths = || chosen.iter().map(|index| sequences.tokens[*index].len());
        let hidden = float_bytes(lengths().sum(), spec.hidden_size);
        let held = (hidden / 2).saturating_mul(spec.layers.len() as u64);
        let mut ends = Measure::default();
        exact_ends.lm_head_projection(&mut ends)?;
        exact_ends.lm_head(&mut ends)?;
        exact_ends.embedding(&mut ends)?;
        // The hidden states before each layer, and the last ones with their gradient; logits, and their part of the matrix.
        let of_logits = float_bytes(2 * logit_rows(spec), spec.vocab_size);
        let computing = [hidden, hidden, ends.bytes, of_logits].into_iter().fold(held, u64::saturating_add);
        Ok(Some(Self { held, computing, longest: lengths().max().unwrap_or(0), part_panels }))
    }

    /// Returns the bytes of the sums of a layer's linear layers.
    pub fn sums(&self, linears: &[CalibratedSite]) -> u64 {
        let corrected = linears.iter().filter(|linear| linear.corrects);
        corrected.map(|linear| OutputGradients::bytes_for(&linear.bands, self.part_panels)).fold(0, u64::saturating_add)
    }

    /// Returns the bytes of the errors of a part of a matrix on each thread.
    pub fn errors(&self, linears: &[CalibratedSite], threads: usize) -> u64 {
        let widest = linears.iter().map(|linear| linear.columns).max().unwrap_or(0);
        float_bytes(self.part_panels * LANES, widest).saturating_mul(threads as u64)
    }

    /// Returns the bytes of the activations of a layer and of their gradients, and of a transposed part of a matrix.
    pub fn running(&self, linears: &[CalibratedSite]) -> u64 {
        let widest = linears.iter().map(|linear| linear.columns.max(linear.outputs)).max().unwrap_or(0);
        // At most eight activations of a network are in memory.
        float_bytes(8 * self.longest + 2 * TRANSPOSED_ROWS, widest)
    }
}

/// Returns the number of rows whose logits are computed at a time.
fn logit_rows(spec: &ModelSpec) -> usize {
    (MAX_LOGITS / spec.vocab_size).clamp(1, MAX_LOGIT_ROWS)
}

/// Weights that compute logits from the hidden states after the last layer.
struct Output<'a> {
    spec: &'a ModelSpec,
    head: LmHeadSpec,
    norm: Option<Norm>,
    projection: Option<Linear>,
    lm_head: Option<Linear>,
    bias: Option<Vec<f32>>,
}

impl<'a> Output<'a> {
    fn load(spec: &'a ModelSpec, loader: &Loader<'_>, exec: Exec<'_>) -> Result<Self, LoadError> {
        let norm = loader.final_norm()?;
        let projection = loader.lm_head_projection(&mut in_memory(exec, &mut |_, _| ()))?;
        let (lm_head, bias) = loader.lm_head(&mut in_memory(exec, &mut |_, _| ()))?;
        Ok(Self { spec, head: spec.lm_head.expect("a model with an lm_head"), norm, projection, lm_head, bias })
    }

    /// Returns the gradient of the loss with respect to the hidden states. `tied` is the matrix of a tied lm_head.
    fn gradient(&self, exec: Exec<'_>, tied: Option<&Linear>, hidden: &[f32]) -> Result<Vec<f32>, LoadError> {
        let Self { spec, head, norm, projection, lm_head, bias } = self;
        let (width, adapters) = (spec.hidden_size, RefCell::default());
        let weights = LmHeadWeights { projection: None, lm_head: lm_head.as_ref(), tied, bias: bias.as_deref() };
        let matrix = lm_head.as_ref().or(tied).expect("the matrix of the lm_head");
        let labels = RandomMatrix::new("labels", hidden.len() / width);
        let mut gradients = Vec::with_capacity(hidden.len());
        for hidden in hidden.chunks(logit_rows(spec) * width) {
            let mut rows = hidden.to_vec();
            norm_in_place(&exec, norm.as_ref(), &mut rows, width)?;
            if let Some(projection) = projection {
                let mut narrow = vec![0.0; rows.len() / width * spec.embedding_width()];
                linear(&exec, projection, &rows, &mut narrow)?;
                rows = narrow;
            }
            let mut logits = vec![0.0; hidden.len() / width * spec.vocab_size];
            multiply_lm_head(&exec, spec, weights, &rows, AdapterRows::new(&[], &adapters), &mut logits)?;
            let first = gradients.len() / width;
            for_rows(&exec, hidden.len() / width, &mut logits, spec.vocab_size, |row, logits| {
                let mut uniform = [0.0];
                labels.read_row(first + row, &mut uniform);
                // Numbers of a row of one are between -sqrt(3) and sqrt(3).
                logit_gradient(logits, f64::from(uniform[0]) / 12f64.sqrt() + 0.5, *head);
            })?;
            scale_unless_one(&exec, &mut logits, head.scale)?;
            let mut gradient = linear_gradient(&exec, matrix, &logits)?;
            if let Some(projection) = projection {
                gradient = linear_gradient(&exec, projection, &gradient)?;
            }
            norm_gradient(&exec, norm.as_ref(), hidden, width, &mut gradient)?;
            gradients.append(&mut gradient);
        }
        Ok(gradients)
    }
}

/// Replaces the logits of a row by the gradient of the loss with respect to them before their soft cap: the probabilities,
/// minus one for the token that a number from 0 to 1 draws.
fn logit_gradient(logits: &mut [f32], uniform: f64, head: LmHeadSpec) {
    let slope = |logit: f32| head.softcap.map_or(1.0, |cap| 1.0 - (logit / cap).powi(2));
    let most = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let share = |logit: f32| f64::from(logit - most).exp();
    let total: f64 = logits.iter().map(|logit| share(*logit)).sum();
    let mut left = uniform * total;
    let drawn = logits.iter().position(|logit| {
        left -= share(*logit);
        left <= 0.0
    });
    // Rounding may leave a rest after the last token.
    let drawn = drawn.unwrap_or(logits.len() - 1);
    for (token, logit) in logits.iter_mut().enumerate() {
        let expected = if token == drawn { 1.0 } else { 0.0 };
        *logit = (share(*logit) / total - expected) as f32 * slope(*logit);
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroUsize;

    use ferrule_kernels::arch::Isa;
    use ferrule_kernels::{Cancel, Pool};
    use serde_json::{Value, json};

    use super::super::pass::Hidden;
    use super::*;
    use crate::specs;

    /// Changes the blocks of a layer.
    type Change = fn(&mut Value, &mut Value);

    /// Kinds of layers.
    const KINDS: [(&str, Change); 7] = [
        ("plain", |_, _| ()),
        ("window", |attention, _| attention["mixer"]["window"] = json!(5)),
        ("soft cap", |attention, _| attention["mixer"]["softcap"] = json!(0.5)),
        ("norms of heads", |attention, _| {
            let norm = json!({"type": "rms", "eps": 1e-5, "weight_offset": 0.5, "weight": true});
            attention["mixer"]["projections"]["qk_norm"] = json!({"norm": norm, "over": "head", "after_rope": false});
        }),
        ("norms over all heads, scaled residuals", |attention, ffn| {
            let norm = json!({"type": "rms", "eps": 1e-5, "weight_offset": 0.0, "weight": true});
            attention["mixer"]["projections"]["qk_norm"] = json!({"norm": norm, "over": "heads", "after_rope": false});
            for block in [attention, ffn] {
                block["post_norm"] = norm.clone();
                block["residual_scale"] = json!(0.7);
                block["stream_scale"] = json!(0.9);
                block["input_scale"] = json!(1.3);
            }
        }),
        ("layer norms, biases, no gate", |attention, ffn| {
            let norm = json!({"type": "layer", "eps": 1e-5, "weight_offset": 0.0, "weight": true, "bias": true});
            for block in [&mut *attention, ffn] {
                block["norm"] = norm.clone();
            }
            attention["mixer"]["projections"]["bias"] = json!(true);
            ffn["mixer"]["gated"] = json!(false);
            ffn["mixer"]["bias"] = json!(true);
            ffn["mixer"]["activation"] = json!("gelu");
        }),
        ("scaled gate", |attention, ffn| {
            attention["mixer"]["rope"] = Value::Null;
            ffn["mixer"]["gate_scale"] = json!(1.5);
        }),
    ];

    fn spec_of(change: impl Fn(&mut Value, &mut Value), causal: bool) -> ModelSpec {
        let mut json = specs::llama(96, 1);
        json["causal"] = json!(causal);
        let [attention, ffn] = json["layers"][0]["blocks"].as_array_mut().unwrap().get_disjoint_mut([0, 1]).unwrap();
        change(attention, ffn);
        ModelSpec::from_json(&json.to_string()).unwrap()
    }

    #[test]
    fn gradients_are_those_of_finite_differences() {
        let (pool, cancel) = (Pool::new(NonZeroUsize::new(2).unwrap()), Cancel::new());
        let exec = Exec { isa: Isa::best(), pool: &pool, cancel: &cancel };
        let sequences = [(0..21).map(|i| i * i % 96).collect::<Vec<u32>>()];
        for ((name, change), causal) in KINDS.iter().flat_map(|kind| [(kind, true), (kind, false)]) {
            let spec = spec_of(change, causal);
            let loader = Loader::new(&spec, Source::Random, Quantization::F32);
            assert!(has_gradient(&spec.layers[0]), "{name}");
            let embedding = loader.embedding(&mut in_memory(exec, &mut |_, _| ())).unwrap();
            let layer = loader.layer(&mut in_memory(exec, &mut |_, _| ()), 0, &spec.layers[0], &[]).unwrap();
            let mut pass = Pass::new(exec, &spec, &sequences, &embedding, &[], None).unwrap();
            let hidden = pass.state.hidden.clone().into_f32();
            let numbers = |name: &str| {
                let mut numbers = vec![0.0; hidden.len()];
                RandomMatrix::new(name, 1).read_row(0, &mut numbers);
                let scale = (hidden.len() as f32).sqrt();
                numbers.iter_mut().for_each(|x| *x *= scale);
                numbers
            };
            let direction = numbers("of the loss");
            let mut loss = |hidden: Vec<f32>| -> f64 {
                pass.state.hidden = Hidden::F32(hidden);
                pass.advance(&layer, 0, &mut || ()).unwrap();
                let after = std::mem::take(&mut pass.state.hidden).into_f32();
                after.iter().zip(&direction).map(|(x, d)| f64::from(*x) * f64::from(*d)).sum()
            };
            let changes = ["a", "b", "c"].map(numbers);
            const STEP: f32 = 1e-3;
            let expected = changes.each_ref().map(|change| {
                let moved = |step: f32| hidden.iter().zip(change).map(|(x, change)| x + step * change).collect();
                (loss(moved(STEP)) - loss(moved(-STEP))) / f64::from(2.0 * STEP)
            });
            let mut gradient = direction.clone();
            let mut seen = 0;
            let see = &mut |_: &Exec<'_>, linear: &Linear, gradients: &[f32]| {
                assert_eq!(gradients.len(), 21 * linear.outputs);
                seen += 1;
                Ok(())
            };
            pass.gradient((&layer, 0), 0, &hidden, &mut gradient, see).unwrap();
            assert_eq!(seen, 4, "{name}");
            let norm = gradient.iter().map(|x| f64::from(x * x)).sum::<f64>().sqrt();
            for (change, expected) in changes.iter().zip(expected) {
                let found: f64 = gradient.iter().zip(change).map(|(g, change)| f64::from(g * change)).sum();
                assert!(
                    (found - expected).abs() < 5e-3 * norm,
                    "{name}, {causal}: {found}, not {expected}; norm {norm}"
                );
            }
        }
    }

    #[test]
    fn other_layers_have_no_gradients() {
        let changes: [Change; 4] = [
            |attention, _| attention["mixer"]["sinks"] = json!(true),
            |attention, _| attention["mixer"]["projections"]["clip"] = json!(3.0),
            |_, ffn| ffn["parallel"] = json!(true),
            |_, ffn| ffn["mixer"]["clamp"] = json!({"alpha": 1.7, "limit": 7.0}),
        ];
        for change in changes {
            assert!(!has_gradient(&spec_of(change, true).layers[0]));
        }
    }

    #[test]
    fn tokens_are_drawn_by_their_probabilities() {
        const DRAWS: usize = 20_000;
        let logits = [0.5, -1.0, 2.0, 0.0, 1.5];
        for softcap in [None, Some(3.0)] {
            let head = LmHeadSpec { tied: true, bias: false, scale: 1.0, softcap };
            let mut means = [0.0; 5];
            for draw in 0..DRAWS {
                let mut gradient = logits;
                logit_gradient(&mut gradient, (draw as f64 + 0.5) / DRAWS as f64, head);
                // One element is negative: that of the token that was drawn.
                assert_eq!(gradient.iter().filter(|x| **x < 0.0).count(), 1);
                means.iter_mut().zip(gradient).for_each(|(mean, x)| *mean += f64::from(x) / DRAWS as f64);
            }
            assert!(means.iter().all(|mean| mean.abs() < 1e-3), "{means:?}");
        }
    }

    #[test]
    fn few_tokens_have_no_gradients() {
        let spec = spec_of(|_, _| (), true);
        let panels = |count: usize| Gradients::plan(&spec, &vec![vec![1; 100]; count]).1;
        assert_eq!([0, 1, 5, 6, 100].map(panels), [0, 0, 0, 2, MAX_PART_PANELS]);
    }
}
