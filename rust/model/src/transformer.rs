//! The forward pass: one for every architecture, over a ragged batch of prompt pieces and decode rows.

use std::sync::Arc;

use ferrule_formats::Checkpoint;
use ferrule_kernels::activation::gated;
use ferrule_kernels::arch::Isa;
use ferrule_kernels::attention::{AttentionSequence, AttentionShape, attention};
use ferrule_kernels::elementwise::{add, add_bias};
use ferrule_kernels::kv::{KvFormat, KvRow, KvShape, KvStore, PAGE_TOKENS, PageId};
use ferrule_kernels::norm::{layer_norm, rms_norm, rms_norm_in_place};
use ferrule_kernels::rope::{Rope, rope_in_place};
use ferrule_kernels::{Cancel, Exec, Format, Pool, PoolError, Rows, RowsMut, machine, matmul};

use crate::batch::{Batch, ForwardError, KvGroup, LanguageModel, LogitRows};
use crate::rope::RopeRows;
use crate::spec::{AttentionSpec, FfnSpec, HeadNormSpec, ModelSpec, NormSpec};
use crate::weights::{Layer, Linear, LoadError, Loader, Norm, Progress, Weights};

/// How a model is loaded.
#[derive(Debug, Clone, Copy)]
pub struct LoadOptions {
    /// The weights' format; none means as they are stored.
    pub format: Option<Format>,
    /// The format of keys and values in the cache.
    pub kv_format: KvFormat,
    /// The instructions to use.
    pub isa: Isa,
}

/// A model with its weights, its key-value cache and its threads.
pub struct Transformer {
    spec: ModelSpec,
    weights: Weights,
    /// For each layer its group and its place within the group.
    places: Vec<(usize, usize)>,
    shapes: Vec<KvShape>,
    groups: Vec<KvGroup>,
    stores: Vec<KvStore>,
    kv_format: KvFormat,
    isa: Isa,
    pool: Arc<Pool>,
    scratch: Scratch,
}

/// Buffers of a forward pass, kept from step to step. Shapes: `[rows, width]`.
#[derive(Default)]
struct Scratch {
    hidden: Vec<f32>,
    normed: Vec<f32>,
    qkv: Vec<f32>,
    attended: Vec<f32>,
    projected: Vec<f32>,
    gate_up: Vec<f32>,
    activated: Vec<f32>,
    ropes: Vec<RopeRows>,
    /// For each group the page and slot of every row.
    places: Vec<Vec<KvRow>>,
}

impl Transformer {
    /// Packs a checkpoint's weights. The cache has no pages yet: see [`Transformer::allocate_kv`].
    ///
    /// # Errors
    /// [`LoadError`] for files that do not fit the spec, too little memory, or a cancelled load.
    pub fn load(
        spec: ModelSpec,
        checkpoint: &Checkpoint,
        options: LoadOptions,
        pool: Arc<Pool>,
        cancel: &Cancel,
        progress: Progress<'_>,
    ) -> Result<Self, LoadError> {
        let LoadOptions { format, kv_format, isa } = options;
        let exec = Exec { isa, pool: &pool, cancel };
        let weights = Loader { spec: &spec, checkpoint, format, exec }.load(progress)?;
        let mut shapes: Vec<KvShape> = Vec::new();
        let mut windows = Vec::new();
        let mut places = Vec::with_capacity(spec.layers.len());
        for layer in &spec.layers {
            let AttentionSpec { kv_heads, key_dim, value_dim, window, .. } = layer.attention;
            let same = |(shape, other): (&KvShape, &Option<usize>)| {
                (shape.kv_heads, shape.key_dim, shape.value_dim, *other) == (kv_heads, key_dim, value_dim, window)
            };
            let group = shapes.iter().zip(&windows).position(same).unwrap_or_else(|| {
                shapes.push(KvShape { layers: 0, kv_heads, key_dim, value_dim });
                windows.push(window);
                shapes.len() - 1
            });
            places.push((group, shapes[group].layers));
            shapes[group].layers += 1;
        }
        let groups = shapes.iter().zip(&windows);
        let groups = groups.map(|(shape, window)| KvGroup {
            layers: shape.layers,
            window: *window,
            page_bytes: KvStore::page_bytes(kv_format, *shape).unwrap_or(u64::MAX),
        });
        let groups = groups.collect();
        let stores = Vec::new();
        Ok(Self { spec, weights, places, shapes, groups, stores, kv_format, isa, pool, scratch: Scratch::default() })
    }

    /// Gives each group a cache of `pages` pages, empty. Memory is taken as pages are first written.
    ///
    /// # Errors
    /// [`LoadError::Memory`] if the address space is too small.
    pub fn allocate_kv(&mut self, pages: usize) -> Result<(), LoadError> {
        self.stores.clear();
        for shape in &self.shapes {
            let store = KvStore::new(self.kv_format, *shape, pages).map_err(|_| LoadError::Memory {
                what: "the key-value cache",
                needs: KvStore::page_bytes(self.kv_format, *shape).unwrap_or(u64::MAX).saturating_mul(pages as u64),
                available: machine::available_memory(),
            })?;
            self.stores.push(store);
        }
        Ok(())
    }

    /// What the model is.
    #[must_use]
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// Bytes of the packed matrices.
    #[must_use]
    pub fn weight_bytes(&self) -> u64 {
        self.weights.bytes()
    }

    /// The format of the head's matrix; most other matrices share it.
    #[must_use]
    pub fn weight_format(&self) -> Format {
        self.weights.head.as_ref().map_or(&self.weights.embedding, |head| &head.weight).format()
    }

    /// The instructions in use.
    #[must_use]
    pub fn isa(&self) -> Isa {
        self.isa
    }

    /// The threads in use.
    #[must_use]
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    fn run(&mut self, batch: Batch<'_>, cancel: &Cancel, logits: &mut Vec<f32>) -> Result<(), PoolError> {
        let Self { spec, weights, places, stores, scratch, .. } = self;
        let exec = Exec { isa: self.isa, pool: &self.pool, cancel };
        let hidden_size = spec.hidden_size;
        let rows = batch.sequences.iter().map(|sequence| sequence.tokens.len()).sum();

        let tokens = batch.sequences.iter().flat_map(|sequence| sequence.tokens);
        let hidden = resized(&mut scratch.hidden, rows * hidden_size);
        for (token, row) in tokens.zip(hidden.chunks_exact_mut(hidden_size)) {
            weights.embedding.read_row(*token as usize, row);
        }
        scratch.ropes.resize_with(spec.ropes.len(), RopeRows::default);
        for (rope, tables) in spec.ropes.iter().zip(&mut scratch.ropes) {
            tables.fill(
                rope,
                batch.sequences.iter().flat_map(|sequence| {
                    let first = sequence.first_position;
                    (first..first + sequence.tokens.len()).map(|position| (position, sequence.prompt_len))
                }),
            );
        }
        scratch.places.resize_with(stores.len(), Vec::new);
        let mut sequences: Vec<Vec<AttentionSequence<'_>>> = Vec::with_capacity(stores.len());
        for (group, kv_rows) in scratch.places.iter_mut().enumerate() {
            kv_rows.clear();
            let mut first_row = 0;
            sequences.push(
                batch
                    .sequences
                    .iter()
                    .map(|sequence| {
                        let pages: &[PageId] = &sequence.pages[group];
                        let positions = sequence.first_position..sequence.first_position + sequence.tokens.len();
                        kv_rows.extend(positions.map(|position| KvRow {
                            page: pages[position / PAGE_TOKENS],
                            slot: position % PAGE_TOKENS,
                        }));
                        let rows = sequence.tokens.len();
                        first_row += rows;
                        AttentionSequence {
                            first_row: first_row - rows,
                            rows,
                            first_position: sequence.first_position,
                            pages,
                        }
                    })
                    .collect(),
            );
        }

        for ((layer, layer_spec), (group, place)) in weights.layers.iter().zip(&spec.layers).zip(places.iter().copied())
        {
            let normed = resized(&mut scratch.normed, rows * hidden_size);
            norm(&exec, &layer.attention_norm, &scratch.hidden, normed)?;
            let attention_spec = &layer_spec.attention;
            let rope = attention_spec.rope.map(|index| (&spec.ropes[index], &scratch.ropes[index]));
            let AttentionSpec { heads, kv_heads, key_dim, value_dim, .. } = *attention_spec;
            let width = layer.qkv.weight.rows();
            let qkv = resized(&mut scratch.qkv, rows * width);
            linear(&exec, &layer.qkv, normed, qkv)?;
            let queries_and_keys = [(0, heads), (heads * key_dim, kv_heads)];
            if let (Some(HeadNormSpec::Rms { eps, weight_offset }), Some(norms)) = (attention_spec.qk_norm, &layer.qk_norm) {
                for ((first, heads), weight) in queries_and_keys.into_iter().zip(norms) {
                    rms_norm_in_place(&exec, RowsMut::new(qkv, width, first), heads, weight, weight_offset, eps)?;
                }
            }
            if let Some((rope, tables)) = rope {
                for (first, heads) in queries_and_keys {
                    let view = RowsMut { data: qkv, stride: width, first };
                    rope_in_place(
                        &exec,
                        view,
                        heads,
                        key_dim,
                        rope.rotary_dim,
                        rope.interleaved,
                        &tables.cos,
                        &tables.sin,
                    )?;
                }
            }
            let view = |first| Rows::new(qkv, width, first);
            let (keys, values) = (view(heads * key_dim), view((heads + kv_heads) * key_dim));
            stores[group].write(&exec, place, &scratch.places[group], keys, values)?;
            let attended = resized(&mut scratch.attended, rows * heads * value_dim);
            let shape = AttentionShape {
                heads,
                kv_heads,
                key_dim,
                value_dim,
                scale: attention_spec.scale,
                window: attention_spec.window,
                softcap: None,
            };
            attention(&exec, view(0), &stores[group], place, &shape, &sequences[group], attended)?;
            let projected = resized(&mut scratch.projected, rows * hidden_size);
            linear(&exec, &layer.output, attended, projected)?;
            add(&exec, &mut scratch.hidden, projected)?;

            norm(&exec, &layer.ffn_norm, &scratch.hidden, normed)?;
            feed_forward(
                &exec,
                layer,
                &layer_spec.ffn,
                normed,
                &mut scratch.gate_up,
                &mut scratch.activated,
                projected,
            )?;
            add(&exec, &mut scratch.hidden, projected)?;
        }

        // Only the rows whose logits are wanted go through the final norm and the head.
        let wanted = gather_wanted(batch, &scratch.hidden, hidden_size, &mut scratch.projected);
        let normed = resized(&mut scratch.normed, wanted * hidden_size);
        norm(&exec, &weights.final_norm, &scratch.projected, normed)?;
        let logits = resized(logits, wanted * spec.vocab_size);
        match &weights.head {
            Some(head) => linear(&exec, head, normed, logits),
            None => matmul(&exec, normed, &weights.embedding, logits),
        }
    }
}

impl LanguageModel for Transformer {
    fn vocab_size(&self) -> usize {
        self.spec.vocab_size
    }

    fn kv_groups(&self) -> &[KvGroup] {
        &self.groups
    }

    fn copy_page(&mut self, group: usize, from: PageId, to: PageId) {
        self.stores[group].copy_page(from, to);
    }

    fn forward(&mut self, batch: Batch<'_>, cancel: &Cancel, logits: &mut Vec<f32>) -> Result<(), ForwardError> {
        Ok(self.run(batch, cancel, logits)?)
    }
}

/// `buffer`, made `length` long. What it held stays: every user writes all of it before reading.
fn resized(buffer: &mut Vec<f32>, length: usize) -> &mut [f32] {
    buffer.resize(length, 0.0);
    buffer
}

fn linear(exec: &Exec<'_>, linear: &Linear, x: &[f32], out: &mut [f32]) -> Result<(), PoolError> {
    matmul(exec, x, &linear.weight, out)?;
    linear.bias.iter().try_for_each(|bias| add_bias(exec, out, bias))
}

fn norm(exec: &Exec<'_>, norm: &Norm, x: &[f32], out: &mut [f32]) -> Result<(), PoolError> {
    match norm.spec {
        NormSpec::Rms { eps, weight_offset } => rms_norm(exec, x, &norm.weight, weight_offset, eps, out),
        NormSpec::Layer { eps } => layer_norm(exec, x, &norm.weight, norm.bias.as_deref(), eps, out),
    }
}

fn feed_forward(
    exec: &Exec<'_>,
    layer: &Layer,
    spec: &FfnSpec,
    x: &[f32],
    gate_up: &mut Vec<f32>,
    activated: &mut Vec<f32>,
    out: &mut [f32],
) -> Result<(), PoolError> {
    let FfnSpec::Gated { intermediate_size, activation, .. } = *spec;
    let rows = x.len() / layer.gate_up.weight.cols();
    let gate_up = resized(gate_up, rows * 2 * intermediate_size);
    linear(exec, &layer.gate_up, x, gate_up)?;
    let activated = resized(activated, rows * intermediate_size);
    gated(exec, gate_up, intermediate_size, activation.into(), activated)?;
    linear(exec, &layer.down, activated, out)
}

/// Copies the hidden rows whose logits are wanted to the front of `out`; says how many.
fn gather_wanted(batch: Batch<'_>, hidden: &[f32], width: usize, out: &mut Vec<f32>) -> usize {
    out.clear();
    let mut first = 0;
    for sequence in batch.sequences {
        let end = first + sequence.tokens.len();
        let from = match sequence.logits {
            LogitRows::None => end,
            LogitRows::Last => end - 1,
            LogitRows::All => first,
        };
        out.extend_from_slice(&hidden[from * width..end * width]);
        first = end;
    }
    out.len() / width
}
