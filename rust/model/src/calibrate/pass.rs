//! Running all calibration sequences through the model, one layer at a time.

use std::cell::RefCell;
use std::ops::Range;
use std::slice;

use ferrule_kernels::kv::{KvFormat, PAGE_TOKENS, PageId};
use ferrule_kernels::{Exec, PoolError, Scratch, machine};

use crate::batch::{Batch, LogitRows, SequenceChunk};
use crate::layer::{AdapterBuffers, AdapterRows, LayerBuffers, Observer, RaggedRows, run_layer};
use crate::memory::{Memory, MemoryLayout};
use crate::mixers::MixerPass;
use crate::rope::RopeRows;
use crate::spec::{LayerSpec, ModelSpec};
use crate::transformer::embed;
use crate::weights::{Embedding, Layer, LoadError};

/// Hidden states of all sequences between two layers.
pub(super) struct Pass<'a> {
    exec: Exec<'a>,
    spec: &'a ModelSpec,
    sequences: &'a [Vec<u32>],
    /// Hidden states of all sequences, concatenated: `[tokens, hidden_size]`.
    hidden: Vec<f32>,
    /// Number of pages of the longest sequence; sequence memory holds one sequence.
    pages: usize,
    ropes: Vec<RopeRows>,
    buffers: LayerBuffers,
    adapters: RefCell<AdapterBuffers>,
}

impl<'a> Pass<'a> {
    /// Computes the hidden states before the first layer.
    pub fn new(
        exec: Exec<'a>,
        spec: &'a ModelSpec,
        sequences: &'a [Vec<u32>],
        embedding: &Embedding,
    ) -> Result<Self, LoadError> {
        let tokens = sequences.iter().map(Vec::len).sum::<usize>();
        let longest = sequences.iter().map(Vec::len).max().unwrap_or(0);
        let mut pass = Self {
            exec,
            spec,
            sequences,
            hidden: vec![0.0; tokens * spec.hidden_size],
            pages: longest.div_ceil(PAGE_TOKENS),
            ropes: Vec::new(),
            buffers: LayerBuffers::default(),
            adapters: RefCell::default(),
        };
        let mut narrow = Scratch::default();
        for (tokens, rows) in pass.places() {
            let chunk = [chunk(tokens, &[])];
            let adapters = AdapterRows::new(&[], &pass.adapters);
            embed(&exec, spec, embedding, Batch { sequences: &chunk }, adapters, &mut narrow, &mut pass.hidden[rows])?;
        }
        Ok(pass)
    }

    /// Returns the number of sequences.
    pub fn sequences(&self) -> usize {
        self.sequences.len()
    }

    /// Runs all sequences through a layer; calls `each` after each of them.
    pub fn advance(&mut self, layer: &Layer, spec: &LayerSpec, each: &mut dyn FnMut()) -> Result<(), LoadError> {
        let mut hidden = std::mem::take(&mut self.hidden);
        let mut memory = self.memory(spec)?;
        for (tokens, rows) in self.places() {
            self.run((spec, layer), tokens, &mut memory, None, &mut hidden[rows])?;
            each();
        }
        self.hidden = hidden;
        Ok(())
    }

    /// Runs a layer with an observer of its linear layers; the hidden states stay unchanged.
    pub fn observe(
        &mut self,
        layer: &Layer,
        spec: &LayerSpec,
        observer: &dyn Observer,
        each: &mut dyn FnMut(),
    ) -> Result<(), LoadError> {
        let mut memory = self.memory(spec)?;
        for (tokens, rows) in self.places() {
            let mut hidden = self.hidden[rows].to_vec();
            self.run((spec, layer), tokens, &mut memory, Some(observer), &mut hidden)?;
            each();
        }
        Ok(())
    }

    /// Returns the hidden states.
    pub fn into_hidden(self) -> Vec<f32> {
        self.hidden
    }

    /// Returns the tokens of each sequence, with the range of its hidden states.
    fn places(&self) -> impl Iterator<Item = (&'a [u32], Range<usize>)> + use<'a> {
        let width = self.spec.hidden_size;
        self.sequences.iter().scan(0, move |first, tokens| {
            let rows = *first..*first + tokens.len() * width;
            *first = rows.end;
            Some((tokens.as_slice(), rows))
        })
    }

    /// Creates the memory of one sequence for one layer.
    fn memory(&self, spec: &LayerSpec) -> Result<LayerMemory, LoadError> {
        let layout = MemoryLayout::new(slice::from_ref(spec), self.spec.causal, KvFormat::F32);
        // A state is read and written in two pages.
        let counts: Vec<_> = layout.groups.iter().map(|group| if group.is_state() { 2 } else { self.pages }).collect();
        let pages = counts.iter().map(|&count| (0..count as PageId).collect()).collect();
        let memory = Memory::new(&layout, KvFormat::F32, &counts);
        let memory = memory.map_err(|needs| LoadError::Memory {
            what: "calibration, for the keys and values of a layer,",
            needs,
            available: machine::available_memory(),
        })?;
        Ok(LayerMemory { layout, memory, pages })
    }

    fn run(
        &mut self,
        layer: (&LayerSpec, &Layer),
        tokens: &[u32],
        LayerMemory { layout, memory, pages }: &mut LayerMemory,
        observer: Option<&dyn Observer>,
        hidden: &mut [f32],
    ) -> Result<(), PoolError> {
        let Self { exec, spec, ropes, buffers, adapters, .. } = self;
        let chunk = [chunk(tokens, pages)];
        let rows = RaggedRows::new(Batch { sequences: &chunk }, &spec.ropes, &layout.groups, ropes);
        let pass = MixerPass {
            exec: *exec,
            causal: spec.causal,
            ropes: &spec.ropes,
            rows: &rows,
            adapters: AdapterRows::new(&[], adapters).observed(observer),
            place: None,
        };
        run_layer(&pass, layer, &layout.places[0], memory, hidden, buffers)
    }
}

/// The memory of one sequence for one layer.
struct LayerMemory {
    layout: MemoryLayout,
    memory: Memory,
    /// Pages of each group.
    pages: Vec<Vec<PageId>>,
}

/// Returns a chunk that is a whole sequence.
fn chunk<'a>(tokens: &'a [u32], pages: &'a [Vec<PageId>]) -> SequenceChunk<'a> {
    SequenceChunk {
        tokens,
        first_position: 0,
        prompt_len: tokens.len(),
        pages,
        token_types: &[],
        logits: LogitRows::None,
        adapter: None,
    }
}
