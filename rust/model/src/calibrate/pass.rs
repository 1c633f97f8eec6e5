//! Running all calibration sequences through the model, one layer at a time.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ops::Range;

use ferrule_kernels::kv::{KvFormat, PAGE_TOKENS, PageId};
use ferrule_kernels::{Exec, PoolError, Scratch, machine};
use half::f16;

use super::count;
use super::recorder::{Recorder, Run};
use crate::batch::{Batch, LogitRows, SequenceChunk};
use crate::layer::{AdapterBuffers, AdapterRows, LayerBuffers, Observer, RaggedRows, run_layer};
use crate::memory::{Memory, MemoryLayout};
use crate::mixers::MixerPass;
use crate::rope::RopeRows;
use crate::spec::{LayerSpec, ModelSpec};
use crate::streams::{StreamEndBuffers, StreamEnds, StreamsSpec};
use crate::transformer::embed;
use crate::weights::{Embedding, Layer, LoadError, TokenTable, release_tokens};

/// State of the exact model, while its sequences run through a layer before those of the quantized model.
pub(super) struct Exact<'a> {
    pub state: &'a mut State,
    /// Whether the state afterwards is that after the layer.
    pub advances: bool,
}

/// All sequences between two layers, with what running a layer needs.
pub(crate) struct Pass<'a> {
    exec: Exec<'a>,
    spec: &'a ModelSpec,
    sequences: &'a [Vec<u32>],
    tables: &'a [TokenTable],
    /// Number of pages of the longest sequence; sequence memory holds one sequence.
    pages: usize,
    pub state: State,
    ropes: Vec<RopeRows>,
    buffers: LayerBuffers,
    adapters: RefCell<AdapterBuffers>,
}

/// Hidden states and memories of all sequences between two layers.
#[derive(Default)]
pub(crate) struct State {
    pub(super) hidden: Hidden,
    /// Hidden states before the first layer, if a mixer reads them: `[tokens, hidden_size]`.
    embedding: Vec<f32>,
    /// Memory of layers whose keys and values others read, by the layer that writes them: one per sequence.
    shared: BTreeMap<usize, Vec<LayerMemory>>,
}

/// Hidden states of all sequences, concatenated: `[tokens, hidden_size]`, or all residual streams side by side.
#[derive(Clone, PartialEq)]
pub(super) enum Hidden {
    F32(Vec<f32>),
    /// f16 of the values times [`F16_SCALE`].
    F16(Vec<f16>),
}

/// Factor with which f16 holds hidden states up to a million; larger ones are clamped. Those above a thousandth have
/// eleven bits.
const F16_SCALE: f32 = 1.0 / 16.0;

impl Default for Hidden {
    fn default() -> Self {
        Self::F32(Vec::new())
    }
}

impl Hidden {
    /// Rounds the hidden states to f16, which takes half of the memory; later ones are rounded when they are written.
    pub fn narrow(&mut self) {
        if let Self::F32(hidden) = self {
            *self = Self::F16(hidden.iter().copied().map(to_f16).collect());
        }
    }

    /// Returns the hidden states in `range`.
    pub fn read(&self, range: Range<usize>) -> Vec<f32> {
        match self {
            Self::F32(hidden) => hidden[range].to_vec(),
            Self::F16(hidden) => hidden[range].iter().copied().map(from_f16).collect(),
        }
    }

    /// Replaces the hidden states in `range`.
    pub fn write(&mut self, range: Range<usize>, rows: &[f32]) {
        match self {
            Self::F32(hidden) => hidden[range].copy_from_slice(rows),
            Self::F16(hidden) => hidden[range].iter_mut().zip(rows).for_each(|(to, from)| *to = to_f16(*from)),
        }
    }

    /// Returns all hidden states.
    pub fn into_f32(self) -> Vec<f32> {
        match self {
            Self::F32(hidden) => hidden,
            Self::F16(hidden) => hidden.into_iter().map(from_f16).collect(),
        }
    }
}

fn to_f16(value: f32) -> f16 {
    f16::from_f32((value * F16_SCALE).clamp(f16::MIN.to_f32(), f16::MAX.to_f32()))
}

fn from_f16(value: f16) -> f32 {
    value.to_f32() / F16_SCALE
}

impl<'a> Pass<'a> {
    /// Computes the hidden states before the first layer.
    pub fn new(
        exec: Exec<'a>,
        spec: &'a ModelSpec,
        sequences: &'a [Vec<u32>],
        embedding: &Embedding,
        tables: &'a [TokenTable],
        streams: Option<&StreamEnds>,
    ) -> Result<Self, LoadError> {
        let tokens = count(sequences);
        let longest = sequences.iter().map(Vec::len).max().unwrap_or(0);
        let mut pass = Self {
            exec,
            spec,
            sequences,
            tables,
            pages: longest.div_ceil(PAGE_TOKENS),
            state: State::default(),
            ropes: Vec::new(),
            buffers: LayerBuffers::default(),
            adapters: RefCell::default(),
        };
        let (mut narrow, mut embedded, mut ends) =
            (Scratch::default(), Scratch::default(), StreamEndBuffers::default());
        let mut all = vec![0.0; tokens * spec.streams_width()];
        for (tokens, rows) in pass.places() {
            let chunk = [chunk(tokens, &[])];
            let adapters = AdapterRows::new(&[], &pass.adapters);
            let hidden = embedded.take(tokens.len() * spec.hidden_size);
            embed(&exec, spec, (embedding, &[]), Batch { sequences: &chunk }, adapters, &mut narrow, hidden)?;
            if spec.reads_embedding(0) {
                pass.state.embedding.extend_from_slice(hidden);
            }
            match (&spec.streams, streams) {
                (Some(spec), Some(weights)) => {
                    let hidden = (&*hidden, pass.spec.hidden_size);
                    spec.ends.begin(&exec, weights, adapters, hidden, &mut ends, &mut all[rows])?;
                }
                _ => all[rows].copy_from_slice(hidden),
            }
        }
        pass.state.hidden = Hidden::F32(all);
        Ok(pass)
    }

    /// Returns the number of sequences.
    pub fn sequences(&self) -> usize {
        self.sequences.len()
    }

    /// Returns a copy of the state.
    pub fn copy_state(&self) -> Result<State, LoadError> {
        let State { hidden, embedding, shared } = &self.state;
        let copy = |writer: usize, memory: &LayerMemory| {
            let mut copied = self.new_memory(writer)?;
            for (group, pages) in memory.pages.iter().enumerate() {
                let (from, to) = (memory.memory.store(group), copied.memory.store_mut(group));
                pages.iter().for_each(|page| to.set_page(*page, from.page(*page)));
            }
            Ok(copied)
        };
        let shared = shared.iter().map(|(writer, each)| {
            let copied = each.iter().map(|memory| copy(*writer, memory)).collect::<Result<_, LoadError>>();
            Ok((*writer, copied?))
        });
        Ok(State {
            hidden: hidden.clone(),
            embedding: embedding.clone(),
            shared: shared.collect::<Result<_, LoadError>>()?,
        })
    }

    /// Runs all sequences through layer `index`; calls `each` after each of them.
    pub fn advance(&mut self, layer: &Layer, index: usize, each: &mut dyn FnMut()) -> Result<(), LoadError> {
        let width = self.spec.streams_width();
        let mut memory = self.memory(index)?;
        for (number, (tokens, rows)) in self.places().enumerate() {
            let (memory, mut hidden) = (memory.of_sequence(number), self.state.hidden.read(rows.clone()));
            self.run((index, layer), tokens, memory, None, rows.start / width, &mut hidden)?;
            self.state.hidden.write(rows, &hidden);
            each();
        }
        self.keep(index, memory);
        Ok(())
    }

    /// Runs all sequences of the exact model through layer `index`.
    pub fn advance_exact(&mut self, exact: &mut State, layer: &Layer, index: usize) -> Result<(), LoadError> {
        std::mem::swap(&mut self.state, exact);
        let advanced = self.advance(layer, index, &mut || ());
        std::mem::swap(&mut self.state, exact);
        advanced
    }

    /// Runs all sequences through layer `index` with a recorder of its linear layers, and those of the exact model
    /// before. The hidden states stay unchanged, except that those of the exact model may advance.
    pub(super) fn observe(
        &mut self,
        layer: (&Layer, usize),
        mut exact: Option<Exact<'_>>,
        recorder: &Recorder<'_>,
        each: &mut dyn FnMut(),
    ) -> Result<(), LoadError> {
        let mut memory = self.memory(layer.1)?;
        let mut of_exact = None;
        if let Some(Exact { state, .. }) = &mut exact {
            std::mem::swap(&mut self.state, state);
            of_exact = Some(self.memory(layer.1)?);
            std::mem::swap(&mut self.state, state);
        }
        for (number, (tokens, rows)) in self.places().enumerate() {
            let tokens = tokens.len();
            if let (Some(Exact { state, advances }), Some(memory)) = (&mut exact, &mut of_exact) {
                std::mem::swap(&mut self.state, state);
                recorder.begin(Run { tokens, is_exact: true, stops: !*advances });
                let hidden = self.recorded_run(layer, number, memory.of_sequence(number), recorder)?;
                if *advances {
                    self.state.hidden.write(rows, &hidden);
                }
                std::mem::swap(&mut self.state, state);
            }
            recorder.begin(Run { tokens, is_exact: false, stops: true });
            self.recorded_run(layer, number, memory.of_sequence(number), recorder)?;
            each();
        }
        self.keep(layer.1, memory);
        if let (Some(Exact { state, .. }), Some(memory)) = (&mut exact, of_exact) {
            std::mem::swap(&mut self.state, state);
            self.keep(layer.1, memory);
            std::mem::swap(&mut self.state, state);
        }
        Ok(())
    }

    /// Runs sequence `number` through a layer with a recorder, and returns its hidden states.
    fn recorded_run(
        &mut self,
        (layer, index): (&Layer, usize),
        number: usize,
        memory: &mut LayerMemory,
        recorder: &Recorder<'_>,
    ) -> Result<Vec<f32>, LoadError> {
        let (tokens, rows) = self.places().nth(number).expect("a sequence");
        let mut hidden = self.state.hidden.read(rows.clone());
        let first_row = rows.start / self.spec.streams_width();
        match self.run((index, layer), tokens, memory, Some(recorder), first_row, &mut hidden) {
            Err(PoolError::Cancelled) if recorder.is_done() => {}
            result => result?,
        }
        Ok(hidden)
    }

    /// Takes the hidden states after the last layer: `[tokens, hidden_size]`.
    pub fn take_hidden(&mut self, streams: Option<&StreamEnds>) -> Result<Vec<f32>, LoadError> {
        let (Some(StreamsSpec { ends, .. }), Some(weights)) = (&self.spec.streams, streams) else {
            return Ok(std::mem::take(&mut self.state.hidden).into_f32());
        };
        let (width, tokens) = (self.spec.hidden_size, count(self.sequences));
        let (mut all, mut buffers) = (Vec::with_capacity(tokens * width), StreamEndBuffers::default());
        for (tokens, rows) in self.places() {
            let mut hidden = vec![0.0; tokens.len() * width];
            let (streams, adapters) = (self.state.hidden.read(rows), AdapterRows::new(&[], &self.adapters));
            ends.end(&self.exec, weights, adapters, (&streams, width), &mut buffers, &mut hidden)?;
            all.append(&mut hidden);
        }
        Ok(all)
    }

    /// Returns the tokens of each sequence, with the range of its hidden states.
    fn places(&self) -> impl Iterator<Item = (&'a [u32], Range<usize>)> + use<'a> {
        let width = self.spec.streams_width();
        self.sequences.iter().scan(0, move |first, tokens| {
            let rows = *first..*first + tokens.len() * width;
            *first = rows.end;
            Some((tokens.as_slice(), rows))
        })
    }

    /// Returns the memory of a layer: that of one sequence, unless others read its keys and values or it reads those of
    /// another.
    fn memory(&mut self, index: usize) -> Result<SequenceMemory, LoadError> {
        let writer = writer(&self.spec.layers, index);
        if let Some(kept) = self.state.shared.remove(&writer) {
            return Ok(SequenceMemory::Each(kept));
        }
        match last_reader(&self.spec.layers, writer) {
            None => Ok(SequenceMemory::One(self.new_memory(writer)?)),
            Some(_) => {
                let each = self.sequences.iter().map(|_| self.new_memory(writer));
                Ok(SequenceMemory::Each(each.collect::<Result<_, _>>()?))
            }
        }
    }

    /// Keeps memory that later layers read.
    fn keep(&mut self, index: usize, memory: SequenceMemory) {
        let writer = writer(&self.spec.layers, index);
        if let SequenceMemory::Each(memory) = memory
            && last_reader(&self.spec.layers, writer).is_some_and(|last| last >= index)
        {
            self.state.shared.insert(writer, memory);
        }
    }

    /// Creates the memory of one sequence for a layer and those that read its keys and values.
    fn new_memory(&self, index: usize) -> Result<LayerMemory, LoadError> {
        let Self { spec, .. } = self;
        let layout = layout(spec, index);
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
        (index, layer): (usize, &Layer),
        tokens: &[u32],
        LayerMemory { layout, memory, pages }: &mut LayerMemory,
        observer: Option<&dyn Observer>,
        first_row: usize,
        hidden: &mut [f32],
    ) -> Result<(), PoolError> {
        let Self { exec, spec, ropes, buffers, adapters, tables, state: State { embedding, .. }, .. } = self;
        let chunk = [chunk(tokens, pages)];
        let embedding_place = first_row * spec.hidden_size..(first_row + tokens.len()) * spec.hidden_size;
        let rows = RaggedRows::new(Batch { sequences: &chunk }, &spec.ropes, &layout.groups, ropes);
        let pass = MixerPass {
            group: None,
            exec: *exec,
            causal: spec.causal,
            ropes: &spec.ropes,
            rows: &rows,
            width: spec.hidden_size,
            embedding: embedding.get(embedding_place).unwrap_or_default(),
            tables,
            adapters: AdapterRows::new(&[], adapters).observed(observer),
            places: &[],
        };
        let result = run_layer(&pass, (&spec.layers[index], layer), &layout.places[index], memory, hidden, buffers);
        release_tokens(tables, tokens);
        result
    }
}

/// Returns the layer whose keys and values a layer reads: its own, or those of an earlier one.
fn writer(layers: &[LayerSpec], index: usize) -> usize {
    layers[index].reads_layer().unwrap_or(index)
}

/// Returns the last layer that reads the keys and values of `index`, besides itself.
fn last_reader(layers: &[LayerSpec], index: usize) -> Option<usize> {
    layers.iter().rposition(|layer| layer.reads_layer() == Some(index))
}

/// Returns the layout of the memory of layer `index` and of all that share keys and values with it, in f32.
fn layout(spec: &ModelSpec, index: usize) -> MemoryLayout {
    let sharing = writer(&spec.layers, index);
    MemoryLayout::of(&spec.layers, |layer| writer(&spec.layers, layer) == sharing, spec.causal, KvFormat::F32)
}

/// Returns the layouts of the memory that is held while layer `index` runs, each with the number of sequences that it is
/// held for, of `sequences`.
pub(super) fn held_memory(spec: &ModelSpec, index: usize, sequences: usize) -> Vec<(MemoryLayout, usize)> {
    let is_read_later = |writer: &usize| last_reader(&spec.layers, *writer).is_some_and(|last| last >= index);
    let mut held: Vec<_> = (0..=index).filter(is_read_later).map(|writer| (layout(spec, writer), sequences)).collect();
    if !is_read_later(&writer(&spec.layers, index)) {
        held.push((layout(spec, index), 1));
    }
    held
}

/// The memory of sequences for one layer.
enum SequenceMemory {
    /// One after the other.
    One(LayerMemory),
    /// Each of them, because other layers read its keys and values.
    Each(Vec<LayerMemory>),
}

impl SequenceMemory {
    /// Returns the memory of a sequence.
    fn of_sequence(&mut self, number: usize) -> &mut LayerMemory {
        match self {
            Self::One(memory) => memory,
            Self::Each(memory) => &mut memory[number],
        }
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
        features: &[],
        logits: LogitRows::None,
        adapter: None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn narrow_hidden_states_are_those_written_to_eleven_bits() {
        let mut hidden = Hidden::F32(vec![0.0, 0.1, -3.0, 1e5, 0.5, 7.0]);
        hidden.narrow();
        let written = [-1e-3, 6e5, 1e-9];
        hidden.write(2..5, &written);
        let (read, expected) = (hidden.read(1..6), [0.1, -1e-3, 6e5, 1e-9, 7.0]);
        for (read, expected) in read.iter().zip(expected) {
            assert!((read - expected).abs() <= expected.abs() / 2048.0 + 1e-6, "{read} for {expected}");
        }
        hidden.write(0..2, &[f32::MAX, f32::MIN]);
        assert!(hidden.into_f32().iter().all(|x| x.is_finite()));
    }
}
