//! Mixture of experts: each token is processed by the experts that the router chooses for it.
//!
//! Rows are gathered by expert, so that the weights of an expert are read once for all of its rows. The shared expert is
//! computed together with the chosen ones. Results are added in the router's order and that of the shared expert last, so
//! that a row's result does not depend on the choices of other rows.

use ferrule_kernels::disjoint::Tiles;
use ferrule_kernels::elementwise::{WeightedRow, add_scaled, weighted_sums};
use ferrule_kernels::{Exec, Format, PackedMatrix, PoolError, Product, Scratch, for_row_chunks};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize};

use super::dense::{self, Dense, DenseSpec, activate_inner, apply_gate};
use super::router::{Choice, RouterSpec, choose};
use crate::layer::{
    AdapterRows, adapted, add_adapters, for_rows, linear, linear_each, normed_or_same, scale_unless_one,
};
use crate::limits::{SpecError, finite, require, size};
use crate::memory::Memory;
use crate::mixers::{At, Mixer, MixerPass, MixerSpec};
use crate::rope::RopeSpec;
use crate::spec::{NormSpec, check_norm};
use crate::weights::{Linear, LoadError, Loader, Norm, Packer, Tensors};

/// A mixture of experts.
#[derive(Debug, Clone, PartialEq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertsSpec {
    /// Number of experts.
    pub experts: usize,
    /// Number of experts that run for each token.
    pub experts_per_token: usize,
    /// Architecture of each expert.
    #[serde(deserialize_with = "dense")]
    pub expert: DenseSpec,
    /// Norm of the experts' input, which is not the router's.
    pub norm: Option<NormSpec>,
    /// Latent that the chosen experts read and write; `None` for rows of the hidden size.
    #[serde(default)]
    pub latent: Option<LatentSpec>,
    /// Router that chooses the experts.
    pub router: RouterSpec,
    /// Shared expert: a network that runs for every token.
    #[serde(deserialize_with = "dense_or_none")]
    pub shared: Option<DenseSpec>,
    /// Whether the output of the shared expert is multiplied by the sigmoid of a projection of the input.
    pub shared_gate: bool,
}

/// Latent of a mixture of experts (Nemotron 3): one matrix projects the input to it, and another the weighted sum of the
/// chosen experts back. The router and the shared expert read the input itself.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct LatentSpec {
    /// Width of the latent.
    pub width: usize,
    /// Whether the projections add a bias.
    pub bias: bool,
}

/// Deserializes a network that must not be a mixture of experts.
fn dense<'de, D: Deserializer<'de>>(json: D) -> Result<DenseSpec, D::Error> {
    match MixerSpec::deserialize(json)? {
        MixerSpec::Dense(dense) => Ok(dense),
        _ => Err(D::Error::custom("experts must be dense networks")),
    }
}

fn dense_or_none<'de, D: Deserializer<'de>>(json: D) -> Result<Option<DenseSpec>, D::Error> {
    match Option::<MixerSpec>::deserialize(json)? {
        None => Ok(None),
        Some(MixerSpec::Dense(dense)) => Ok(Some(dense)),
        Some(_) => Err(D::Error::custom("the shared expert must be a dense network")),
    }
}

/// Upper limit for the number of experts, above that of any known model.
const MAX_EXPERTS: usize = 1 << 16;

/// Rows that are processed at a time: enough that each expert has several, few enough to bound the intermediate
/// buffers.
const CHUNK_ROWS: usize = 512;

/// Weights of a mixture of experts.
pub(crate) struct Experts<M = PackedMatrix> {
    /// One row per expert, in f32.
    router: Linear<M>,
    /// Norm of the router's input.
    router_norm: Option<Norm>,
    /// Factor on the weight of each expert.
    scales: Option<Vec<f32>>,
    /// Norm of the experts' input.
    norm: Option<Norm>,
    /// Correction bias, added to the scores when experts are chosen.
    correction: Option<Vec<f32>>,
    /// Experts of each token id: `[vocab_size, experts_per_token]`.
    token_experts: Option<Vec<f32>>,
    latent: Option<Latent<M>>,
    experts: Vec<Dense<M>>,
    shared: Option<Dense<M>>,
    /// Gate of the shared expert: one row, in f32.
    shared_gate: Option<Linear<M>>,
}

/// Projections to and from the latent.
struct Latent<M> {
    input: Linear<M>,
    output: Linear<M>,
}

/// Buffers of a mixture of experts. The chosen experts have the columns of the latent if there is one.
#[derive(Default)]
pub(crate) struct Buffers {
    /// The router's normed input: `[rows, hidden_size]`.
    router_input: Scratch<f32>,
    /// The experts' normed input: `[rows, hidden_size]`.
    normed: Scratch<f32>,
    /// `[rows, experts]`
    logits: Scratch<f32>,
    /// `[rows]`
    gates: Scratch<f32>,
    /// The experts' input, and then the weighted sums of their outputs: `[rows, columns]`.
    latent: Scratch<f32>,
    /// Rows grouped by expert, one per choice: `[rows * experts_per_token, columns]`.
    gathered: Scratch<f32>,
    /// Outputs of the experts for `gathered`, and then of the shared expert for all rows.
    outputs: Scratch<f32>,
    networks: dense::Buffers,
    shared_network: dense::Buffers,
    /// Outputs that are added to each row.
    terms: Vec<WeightedRow>,
    chosen: Vec<Choice>,
    /// Row of each choice in `gathered`.
    places: Vec<usize>,
    /// Choice of each row of `gathered`.
    sources: Vec<usize>,
}

impl ExpertsSpec {
    /// Returns the columns that the chosen experts read and write.
    fn columns(&self, hidden_size: usize) -> usize {
        self.latent.as_ref().map_or(hidden_size, |latent| latent.width)
    }
}

impl Mixer for ExpertsSpec {
    type Weights<M> = Experts<M>;
    type Buffers = Buffers;

    fn check(&self, path: &str, _: &[RopeSpec], _: usize) -> Result<(), SpecError> {
        let Self { experts, experts_per_token, expert, norm, latent, router, shared, shared_gate } = self;
        require(&format!("{path}.experts"), experts, (1..=MAX_EXPERTS).contains(experts), || {
            format!("in 1..={MAX_EXPERTS}")
        })?;
        expert.limits(&format!("{path}.expert"))?;
        let plain = expert.xielu.is_none() && expert.inner_norm.is_none();
        require(&format!("{path}.expert"), plain, plain, || "without xielu and inner_norm".to_owned())?;
        let path_of_router = format!("{path}.router");
        let RouterSpec { groups, groups_chosen, scale, logit_scale, jitter, .. } = *router;
        check_norm(&format!("{path}.norm"), *norm)?;
        check_norm(&format!("{path_of_router}.norm"), router.norm)?;
        finite(&format!("{path_of_router}.logit_scale"), logit_scale)?;
        finite(&format!("{path_of_router}.scale"), scale)?;
        finite(&format!("{path_of_router}.jitter"), jitter)?;
        require(&format!("{path_of_router}.groups"), groups, groups > 0 && experts.is_multiple_of(groups), || {
            format!("a divisor of experts ({experts})")
        })?;
        require(
            &format!("{path_of_router}.groups_chosen"),
            groups_chosen,
            (1..=groups).contains(&groups_chosen),
            || format!("in 1..={groups}, the number of groups"),
        )?;
        let eligible = experts / groups * groups_chosen;
        require(
            &format!("{path}.experts_per_token"),
            experts_per_token,
            (1..=eligible).contains(experts_per_token),
            || format!("in 1..={eligible}, the experts that may be chosen"),
        )?;
        if let Some(shared) = shared {
            shared.limits(&format!("{path}.shared"))?;
        }
        if let Some(latent) = latent {
            size(&format!("{path}.latent.width"), latent.width)?;
        }
        let is_gated = shared.is_some() && latent.is_none();
        require(&format!("{path}.shared_gate"), shared_gate, !shared_gate || is_gated, || {
            "false where no network is shared, or the others have a latent".to_owned()
        })
    }

    fn load<P: Packer>(
        &self,
        loader: &Loader<'_>,
        packer: &mut P,
        at: At<'_>,
    ) -> Result<Experts<P::Matrix>, LoadError> {
        let Self { experts, router, expert, norm, latent, shared, .. } = self;
        let (hidden, down, at) = (loader.hidden_size(), loader.down(at.layer), at.prefix);
        Ok(Experts {
            router: loader.linear(packer, at, &[("router", *experts, Format::F32)], hidden, router.bias)?,
            router_norm: loader.optional_norm(&format!("{at}router_norm"), router.norm, hidden)?,
            scales: match router.expert_scales {
                true => Some(loader.vector(&format!("{at}router.scales"), *experts)?),
                false => None,
            },
            norm: loader.optional_norm(&format!("{at}input_norm"), *norm, hidden)?,
            correction: match router.correction_bias {
                true => Some(loader.vector(&format!("{at}router.correction_bias"), *experts)?),
                false => None,
            },
            token_experts: match router.token_experts {
                true => Some(loader.ids(&format!("{at}router.token_experts"), self.experts_per_token, *experts)?),
                false => None,
            },
            latent: match latent {
                Some(LatentSpec { width, bias }) => {
                    let usual = loader.usual();
                    Some(Latent {
                        input: loader.linear(packer, at, &[("latent_in", *width, usual)], hidden, *bias)?,
                        output: loader.linear(packer, at, &[("latent_out", hidden, usual)], *width, *bias)?,
                    })
                }
                None => None,
            },
            experts: (0..*experts)
                .map(|index| {
                    let prefix = format!("{at}experts.{index}.");
                    expert.load_at(loader, packer, &prefix, (self.columns(hidden), down))
                })
                .collect::<Result<_, _>>()?,
            shared: match shared {
                Some(shared) => Some(shared.load_at(loader, packer, &format!("{at}shared."), (hidden, down))?),
                None => None,
            },
            shared_gate: match self.shared_gate {
                true => Some(loader.linear(packer, at, &[("shared_gate", 1, Format::F32)], hidden, false)?),
                false => None,
            },
        })
    }

    fn list<'a, M>(weights: &'a Experts<M>, tensors: &mut Tensors<'a, M>) {
        let Experts { router, router_norm, scales, norm, correction, token_experts, .. } = weights;
        let Experts { latent, experts, shared, shared_gate, .. } = weights;
        tensors.linear(router);
        router_norm.iter().chain(norm).for_each(|norm| tensors.norm(norm));
        tensors.vectors.extend(scales.iter().chain(correction).chain(token_experts));
        latent.iter().flat_map(|latent| [&latent.input, &latent.output]).for_each(|linear| tensors.linear(linear));
        experts.iter().chain(shared).for_each(|dense| DenseSpec::list(dense, tensors));
        shared_gate.iter().for_each(|linear| tensors.linear(linear));
    }

    /// Returns the matrices of experts that do not run; all experts are of one size.
    fn idle<'a, M>(&self, weights: &'a Experts<M>) -> Vec<&'a M> {
        let idle = &weights.experts[self.experts_per_token..];
        idle.iter().flat_map(|expert| [&expert.inner.weight, &expert.down.weight]).collect()
    }

    fn buffer_floats(&self, hidden_size: usize, rows: usize) -> usize {
        let columns = self.columns(hidden_size);
        let chosen = 2 * columns + self.expert.floats_within();
        let latent = if self.latent.is_some() { columns } else { 0 };
        let shared = self.shared.iter().map(|shared| hidden_size + shared.floats_within()).sum::<usize>();
        let normed = [self.norm, self.router.norm].iter().flatten().count() * hidden_size;
        rows.min(CHUNK_ROWS) * (self.experts + self.experts_per_token * chosen + latent + shared) + rows * normed
    }

    fn longest_input(&self, hidden_size: usize) -> usize {
        let inner = self.shared.iter().map(|shared| shared.intermediate_size).sum::<usize>();
        let chosen = self.experts_per_token * self.expert.intermediate_size.max(self.columns(hidden_size));
        (chosen + if self.shared.is_some() { inner.max(hidden_size) } else { 0 }).max(hidden_size)
    }

    fn run(
        &self,
        weights: &Experts,
        pass: &MixerPass<'_>,
        _: &mut Memory,
        x: &[f32],
        buffers: &mut Buffers,
        out: &mut [f32],
    ) -> Result<(), PoolError> {
        let tokens = &pass.rows.tokens;
        ExpertsPass { exec: &pass.exec, weights, spec: self, adapters: pass.adapters }.run(tokens, x, buffers, out)
    }
}

/// A mixture of experts over a batch.
struct ExpertsPass<'a> {
    exec: &'a Exec<'a>,
    weights: &'a Experts,
    spec: &'a ExpertsSpec,
    /// Adapters of the shared expert and its gate. An observer sees the rows of routed experts too.
    adapters: AdapterRows<'a>,
}

impl ExpertsPass<'_> {
    /// Computes `out` from `x`, both `[rows, hidden_size]`. `tokens` has the token of each row.
    fn run(&self, tokens: &[u32], x: &[f32], buffers: &mut Buffers, out: &mut [f32]) -> Result<(), PoolError> {
        let width = self.weights.router.weight.cols();
        let rows = x.len() / width;
        let mut normed = std::mem::take(&mut buffers.normed);
        let input = normed_or_same(self.exec, self.weights.norm.as_ref(), x, width, &mut normed)?;
        let chunk_rows = rows.div_ceil(rows.div_ceil(CHUNK_ROWS).max(1)).max(1);
        let chunks = |x| <[f32]>::chunks(x, chunk_rows * width);
        let routed = tokens.chunks(chunk_rows).zip(chunks(x));
        let chunks = routed.zip(chunks(input)).zip(out.chunks_mut(chunk_rows * width));
        for (((routed, input), out), first) in chunks.zip((0..).step_by(chunk_rows)) {
            self.chunk(routed, input, self.adapters.skip(first), width, buffers, out)?;
        }
        buffers.normed = normed;
        Ok(())
    }

    /// Chooses the experts of every row of the router's input, given with its token, and places the rows of each expert
    /// side by side, in the order of the batch. Returns the number of rows of each expert.
    fn choose(
        &self,
        (tokens, x): (&[u32], &[f32]),
        width: usize,
        buffers: &mut Buffers,
    ) -> Result<Vec<usize>, PoolError> {
        let Self { exec, weights, spec, .. } = self;
        let Buffers { router_input, logits, chosen, places, sources, .. } = buffers;
        let ExpertsSpec { experts, experts_per_token, .. } = **spec;
        let rows = x.len() / width;
        let logits = logits.take(rows * experts);
        let x = normed_or_same(exec, weights.router_norm.as_ref(), x, width, router_input)?;
        linear(exec, &weights.router, x, logits)?;
        scale_unless_one(exec, logits, spec.router.logit_scale)?;
        chosen.clear();
        chosen.resize(rows * experts_per_token, Choice::default());
        let choices = Tiles::row_blocks(chosen, experts_per_token, 1);
        for_row_chunks(exec, logits, experts, experts * experts_per_token, &|first, logits| {
            for (logits, row) in logits.chunks_exact_mut(experts).zip(first..) {
                let given = weights
                    .token_experts
                    .as_deref()
                    .map(|table| &table[tokens[row] as usize * experts_per_token..][..experts_per_token]);
                choose(spec, logits, weights.correction.as_deref(), given, choices.take(row).contiguous());
            }
        })?;
        drop(choices);
        if let Some(scales) = &weights.scales {
            chosen.iter_mut().for_each(|choice| choice.weight *= scales[choice.expert]);
        }
        let mut counts = vec![0; spec.experts];
        chosen.iter().for_each(|choice| counts[choice.expert] += 1);
        let mut next: Vec<usize> = counts
            .iter()
            .scan(0, |first, count| {
                *first += count;
                Some(*first - count)
            })
            .collect();
        places.clear();
        places.extend(chosen.iter().map(|choice| {
            let place = &mut next[choice.expert];
            *place += 1;
            *place - 1
        }));
        sources.clear();
        sources.resize(chosen.len(), 0);
        places.iter().enumerate().for_each(|(choice, &place)| sources[place] = choice);
        Ok(counts)
    }

    /// Computes `out` from the experts' input `x`; the router reads the tokens and inputs `routed`.
    fn chunk(
        &self,
        routed: (&[u32], &[f32]),
        x: &[f32],
        adapters: AdapterRows<'_>,
        width: usize,
        buffers: &mut Buffers,
        out: &mut [f32],
    ) -> Result<(), PoolError> {
        let Self { exec, weights, spec, .. } = *self;
        let counts = self.choose(routed, width, buffers)?;
        let Buffers {
            gates, latent, gathered, outputs, networks, shared_network, terms, chosen, places, sources, ..
        } = buffers;
        let (rows, columns) = (x.len() / width, spec.columns(width));
        let (each, weigh_input) = (spec.experts_per_token, spec.router.weigh_input);
        let experts_input = match &weights.latent {
            Some(Latent { input, .. }) => {
                let projected = latent.take(rows * columns);
                adapted(exec, input, adapters, x, projected)?;
                projected
            }
            None => x,
        };
        // A single row is read and quantized in place, once for all of its experts.
        let gathered = if rows == 1 && !weigh_input {
            Gathered::One(experts_input)
        } else {
            let gathered = gathered.take(chosen.len() * columns);
            for_rows(exec, rows, gathered, columns, |place, row| {
                let choice = sources[place];
                row.copy_from_slice(&experts_input[choice / each * columns..][..columns]);
                if weigh_input {
                    row.iter_mut().for_each(|x| *x *= chosen[choice].weight);
                }
            })?;
            Gathered::Each(gathered)
        };
        let active = || weights.experts.iter().zip(&counts).filter(|(_, count)| **count > 0);
        let shared = weights.shared.as_ref().zip(spec.shared.as_ref());

        let inner = networks.inner.take(chosen.len() * spec.expert.inner_rows());
        let shared_inner = shared_network.inner.take(shared.map_or(0, |(_, spec)| rows * spec.inner_rows()));
        let mut products = Products { exec, adapters, layers: Vec::new(), products: Vec::new() };
        products.gathered(active().map(|(expert, &count)| (&expert.inner, count)), gathered, inner)?;
        products.shared(shared.map(|(shared, _)| (&shared.inner, x)), shared_inner)?;

        let activation = spec.expert.activation.into();
        let activated = apply_gate(exec, &spec.expert, activation, inner, &mut networks.activated)?;
        let shared_activated = match shared {
            Some((weights, spec)) => activate_inner(exec, weights, spec, shared_inner, &mut shared_network.activated)?,
            None => &[],
        };
        let outputs = outputs.take(chosen.len() * columns + if shared.is_some() { rows * width } else { 0 });
        let (routed_outputs, shared_outputs) = outputs.split_at_mut(chosen.len() * columns);
        let mut products = Products { exec, adapters, layers: Vec::new(), products: Vec::new() };
        let activated = Gathered::Each(activated);
        products.gathered(active().map(|(expert, &count)| (&expert.down, count)), activated, routed_outputs)?;
        products.shared(shared.map(|(shared, _)| (&shared.down, shared_activated)), shared_outputs)?;

        let gates = gates.take(weights.shared_gate.iter().len() * rows);
        if let Some(gate) = &weights.shared_gate {
            adapted(exec, gate, adapters, x, gates)?;
        }
        terms.clear();
        let sums_shared = shared.is_some() && weights.latent.is_none();
        for (row, (chosen, places)) in chosen.chunks_exact(each).zip(places.chunks_exact(each)).enumerate() {
            terms.extend(chosen.iter().zip(places).map(|(choice, &place)| {
                let weight = if weigh_input { 1.0 } else { choice.weight };
                WeightedRow { row: place, weight }
            }));
            if sums_shared {
                let weight = gates.get(row).map_or(1.0, |gate| 1.0 / (1.0 + (-gate).exp()));
                terms.push(WeightedRow { row: rows * each + row, weight });
            }
        }
        let Some(Latent { output, .. }) = &weights.latent else {
            return weighted_sums(exec, outputs, width, terms, out);
        };
        let sums = latent.take(rows * columns);
        weighted_sums(exec, routed_outputs, columns, terms, sums)?;
        adapted(exec, output, adapters, sums, out)?;
        if shared.is_some() { add_scaled(exec, out, shared_outputs, 1.0) } else { Ok(()) }
    }
}

/// Inputs of the experts.
#[derive(Clone, Copy)]
enum Gathered<'a> {
    /// Each expert has its own rows, after those of the expert before it.
    Each(&'a [f32]),
    /// All experts read the same row.
    One(&'a [f32]),
}

/// Linear layers of the experts that are computed together.
struct Products<'a> {
    exec: &'a Exec<'a>,
    adapters: AdapterRows<'a>,
    layers: Vec<&'a Linear>,
    products: Vec<Product<'a>>,
}

impl<'a> Products<'a> {
    /// Adds the products of rows of `x` with the matrices of the chosen experts; each expert has the outputs number of
    /// rows.
    fn gathered(
        &mut self,
        experts: impl Iterator<Item = (&'a Linear, usize)>,
        mut x: Gathered<'a>,
        out: &'a mut [f32],
    ) -> Result<(), PoolError> {
        let mut left = out;
        for (layer, rows) in experts {
            let x_rows = match x {
                Gathered::One(row) => row,
                Gathered::Each(all) => {
                    let (rows, others) = all.split_at(rows * layer.weight.cols());
                    x = Gathered::Each(others);
                    rows
                }
            };
            let (out, rest) = left.split_at_mut(rows * layer.outputs);
            left = rest;
            self.push(layer, x_rows, out)?;
        }
        Ok(())
    }

    fn push(&mut self, layer: &'a Linear, x: &'a [f32], out: &'a mut [f32]) -> Result<(), PoolError> {
        self.adapters.observe(self.exec, layer, x, None)?;
        self.layers.push(layer);
        self.products.push(Product { x, w: self.adapters.matrix(layer), out });
        Ok(())
    }

    /// Adds the product of the shared expert, if there is one, and computes all products; only the shared expert has
    /// adapters.
    fn shared(mut self, shared: Option<(&'a Linear, &'a [f32])>, out: &'a mut [f32]) -> Result<(), PoolError> {
        let Some((layer, x)) = shared else { return linear_each(self.exec, &self.layers, &mut self.products) };
        // Workers divide large matrices alone, and those of the shared expert may have another size.
        if self.layers.first().is_some_and(|first| first.group.is_some() != layer.group.is_some()) {
            linear_each(self.exec, &self.layers, &mut self.products)?;
            self.layers.clear();
            self.products.clear();
        }
        self.push(layer, x, out)?;
        linear_each(self.exec, &self.layers, &mut self.products)?;
        let Some(product) = self.products.last_mut() else { return Ok(()) };
        add_adapters(self.exec, layer, self.adapters, x, product.out)
    }
}
