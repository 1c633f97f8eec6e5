//! The forward pass: one for every architecture, over a ragged batch of prompt pieces and decode rows.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use ferrule_kernels::arch::Isa;
use ferrule_kernels::elementwise::add;
use ferrule_kernels::kv::{KvFormat, KvShape, KvStore, PageId};
use ferrule_kernels::{Cancel, Exec, Pool, PoolError, Scratch, machine, matmul};

use crate::batch::{Batch, ForwardError, KvGroup, LanguageModel, LogitRows};
use crate::fingerprint::fingerprint;
use crate::layer::{AttentionPass, RaggedRows, feed_forward, linear, norm};
use crate::quantization::Quantization;
use crate::rope::RopeRows;
use crate::spec::{AttentionSpec, ModelSpec};
use crate::weights::{LoadError, Loader, Progress, Source, Weights};

/// How a model is loaded.
#[derive(Debug, Clone, Copy)]
pub struct LoadOptions {
    /// The weights' formats.
    pub quantization: Quantization,
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
    options: LoadOptions,
    pool: Arc<Pool>,
    buffers: Buffers,
    /// Computed when it is first asked for.
    fingerprint: OnceLock<[u8; 32]>,
}

/// Buffers of a forward pass, kept from step to step. Shapes: `[rows, width]`.
#[derive(Default)]
struct Buffers {
    /// The residual stream.
    hidden: Scratch<f32>,
    normed: Scratch<f32>,
    /// What a block adds to the residual stream.
    update: Scratch<f32>,
    /// Queries, keys and values; gate and up.
    inner: Scratch<f32>,
    /// What attention mixed; what the gate let through.
    mixed: Scratch<f32>,
    ropes: Vec<RopeRows>,
}

impl Transformer {
    /// Packs the weights of a source. The cache has no pages yet: see [`Transformer::allocate_kv`].
    ///
    /// # Errors
    /// [`LoadError`] for files that do not fit the spec, too little memory, or a cancelled load.
    pub fn load(
        spec: ModelSpec,
        source: Source<'_>,
        options: LoadOptions,
        pool: Arc<Pool>,
        cancel: &Cancel,
        progress: Progress<'_>,
    ) -> Result<Self, LoadError> {
        let LoadOptions { quantization, kv_format, isa } = options;
        let exec = Exec { isa, pool: &pool, cancel };
        let weights = Loader { spec: &spec, source, quantization, exec }.load(progress)?;
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
        Ok(Self {
            spec,
            weights,
            places,
            shapes,
            groups,
            stores,
            options,
            pool,
            buffers: Buffers::default(),
            fingerprint: OnceLock::new(),
        })
    }

    /// Gives each group of layers a cache of so many pages, empty. Memory is taken as pages are first written.
    ///
    /// # Errors
    /// [`LoadError::Memory`] if the address space is too small.
    pub fn allocate_kv(&mut self, pages: &[usize]) -> Result<(), LoadError> {
        self.stores.clear();
        for (shape, &pages) in self.shapes.iter().zip(pages) {
            let store = KvStore::new(self.options.kv_format, *shape, pages).map_err(|_| LoadError::Memory {
                what: "the key-value cache",
                needs: KvStore::page_bytes(self.options.kv_format, *shape)
                    .unwrap_or(u64::MAX)
                    .saturating_mul(pages as u64),
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

    /// Weights of the matrices, a tied one counted once.
    #[must_use]
    pub fn parameters(&self) -> u64 {
        self.weights.matrices().map(|matrix| matrix.rows() as u64 * matrix.cols() as u64).sum()
    }

    /// Weights of the layers' matrices, without embedding and head.
    #[must_use]
    pub fn layer_parameters(&self) -> u64 {
        let weights = &self.weights;
        let ends = weights.head.iter().map(|head| &head.weight).chain([&weights.embedding]);
        self.parameters() - ends.map(|matrix| matrix.rows() as u64 * matrix.cols() as u64).sum::<u64>()
    }

    /// Bytes of the packed matrices.
    #[must_use]
    pub fn weight_bytes(&self) -> u64 {
        self.weights.matrices().map(|matrix| matrix.bytes() as u64).sum()
    }

    /// Bytes of the matrices that each decode step reads whole: all but an embedding that is not the head too.
    #[must_use]
    pub fn weight_bytes_per_token(&self) -> u64 {
        let embedding = if self.weights.head.is_some() { self.weights.embedding.bytes() } else { 0 };
        self.weight_bytes() - embedding as u64
    }

    /// How the weights are stored.
    #[must_use]
    pub fn quantization(&self) -> Quantization {
        self.options.quantization
    }

    /// The instructions in use.
    #[must_use]
    pub fn isa(&self) -> Isa {
        self.options.isa
    }

    /// The threads in use.
    #[must_use]
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    fn run(&mut self, batch: Batch<'_>, cancel: &Cancel, logits: &mut Vec<f32>) -> Result<(), PoolError> {
        let Self { spec, weights, places, stores, buffers, .. } = self;
        let exec = Exec { isa: self.options.isa, pool: &self.pool, cancel };
        let rows = RaggedRows::new(batch, &spec.ropes, stores.len(), &mut buffers.ropes);
        let width = spec.hidden_size;

        let hidden = buffers.hidden.take(rows.count * width);
        for (token, row) in batch.tokens().zip(hidden.chunks_exact_mut(width)) {
            weights.embedding.read_row(token as usize, row);
        }
        for ((layer, layer_spec), &(group, place)) in weights.layers.iter().zip(&spec.layers).zip(&*places) {
            let normed = buffers.normed.take(rows.count * width);
            let update = buffers.update.take(rows.count * width);
            norm(&exec, &layer.attention_norm, hidden, normed)?;
            let pass = AttentionPass {
                exec,
                layer,
                spec: &layer_spec.attention,
                ropes: &spec.ropes,
                rows: &rows,
                group,
                place,
            };
            pass.run(&mut stores[group], normed, &mut buffers.inner, &mut buffers.mixed, update)?;
            add(&exec, hidden, update)?;
            norm(&exec, &layer.ffn_norm, hidden, normed)?;
            feed_forward(&exec, layer, &layer_spec.ffn, normed, &mut buffers.inner, &mut buffers.mixed, update)?;
            add(&exec, hidden, update)?;
        }

        // Only the rows whose logits are wanted go through the final norm and the head.
        let wanted = wanted_rows(batch);
        let count = wanted.iter().map(ExactSizeIterator::len).sum::<usize>();
        let update = buffers.update.take(count * width);
        for (row, to) in wanted.into_iter().flatten().zip(update.chunks_exact_mut(width)) {
            to.copy_from_slice(&hidden[row * width..][..width]);
        }
        let normed = buffers.normed.take(count * width);
        norm(&exec, &weights.final_norm, update, normed)?;
        logits.resize(count * spec.vocab_size, 0.0);
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

    fn shareable_tokens(&self, prompt_len: usize) -> usize {
        self.spec.ropes.iter().map(|rope| rope.shareable_tokens(prompt_len)).min().unwrap_or(usize::MAX)
    }

    fn copy_page(&mut self, group: usize, from: PageId, to: PageId) {
        self.stores[group].copy_page(from, to);
    }

    fn page(&self, group: usize, page: PageId) -> &[u8] {
        self.stores[group].page(page)
    }

    fn set_page(&mut self, group: usize, page: PageId, bytes: &[u8]) {
        self.stores[group].set_page(page, bytes);
    }

    fn fingerprint(&self) -> [u8; 32] {
        *self.fingerprint.get_or_init(|| fingerprint(&self.spec, &self.weights, self.options, &self.pool))
    }

    fn forward(&mut self, batch: Batch<'_>, cancel: &Cancel, logits: &mut Vec<f32>) -> Result<(), ForwardError> {
        Ok(self.run(batch, cancel, logits)?)
    }
}

/// The rows of a batch whose logits are wanted, for each sequence.
fn wanted_rows(batch: Batch<'_>) -> Vec<Range<usize>> {
    let mut end = 0;
    let rows = batch.sequences.iter().map(|sequence| {
        let first = end;
        end += sequence.tokens.len();
        match sequence.logits {
            LogitRows::None => end..end,
            LogitRows::Last => end - 1..end,
            LogitRows::All => first..end,
        }
    });
    rows.collect()
}
