//! Fake language model that computes nothing and checks everything.
//!
//! Each slot of a page stores the token, its position, and a hash of all tokens up to it. A forward pass reads the hash
//! of the position before its chunk from the page, and checks that everything a row attends to is as expected. So the
//! logits, derived from the hash, are right only if every page is. The fake also rejects batches that exceed the
//! limits, and fails on request.

pub mod between_steps;
pub mod outputs;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::time::Duration;

use ferrule_engine::{Engine, EngineConfig, PAGE_NONE, SpeculativeConfig, StepOutput};
use ferrule_kernels::Cancel;
use ferrule_kernels::kv::{PAGE_TOKENS, PageId};
use ferrule_model::{
    Adapter, Batch, BatchQueue, Capabilities, ClassifierInfo, ForwardError, GroupKind, KvGroup, LanguageModel,
    LogitRows, Pooling, SequenceChunk,
};

/// Window that stands for a group of state.
pub const STATE: Option<usize> = Some(0);

/// Vocabulary size.
pub const VOCAB: usize = 64;

/// Sizes of hidden states, embeddings and classifier scores; number of token types.
pub const HIDDEN: usize = 3;
pub const EMBEDDING: usize = 5;
pub const LABELS: usize = 2;
pub const TOKEN_TYPES: usize = 4;

/// A fault to inject into a forward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// Cancelled after garbage was written to half of the chunks' positions.
    CancelledMidway,
    /// A worker thread panicked, and the thread pool caught it.
    Panicked,
    /// A panic that nothing caught.
    Unwinds,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Slot {
    position: u64,
    token: u32,
    /// Position of the token.
    kind: u8,
    /// Hash of the tokens up to this one.
    state: u64,
}

/// Bytes of a slot: position, state, token, whether it was written, and the token type.
const SLOT_BYTES: usize = 24;

/// Bytes of a page.
const PAGE_BYTES: usize = PAGE_TOKENS * SLOT_BYTES;

impl Slot {
    fn to_bytes(self) -> [u8; SLOT_BYTES] {
        let mut bytes = [0; SLOT_BYTES];
        bytes[..8].copy_from_slice(&self.position.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.state.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.token.to_le_bytes());
        bytes[20..22].copy_from_slice(&[1, self.kind]);
        bytes
    }

    /// Returns `None` for an unwritten slot.
    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        let token = u32::from_le_bytes(bytes[16..20].try_into().unwrap());
        (bytes[20] == 1).then(|| Self { position: number(0), state: number(8), token, kind: bytes[21] })
    }
}

/// Returns a token's contribution to the hash.
pub fn read(token: u32, kind: u8) -> u64 {
    u64::from(kind) << 32 | u64::from(token)
}

/// A computed chunk: first position, tokens, requested logits.
pub type Chunk = (usize, Vec<u32>, LogitRows);

/// A copy of a page, or a batch, that is not computed yet.
#[derive(Debug)]
enum Queued {
    Copy { group: usize, from: PageId, to: PageId },
    Batch(Vec<QueuedChunk>),
}

/// A [`SequenceChunk`] that owns its tokens and pages.
#[derive(Debug)]
struct QueuedChunk {
    tokens: Vec<u32>,
    first_position: usize,
    prompt_len: usize,
    pages: Vec<Vec<PageId>>,
    logits: LogitRows,
    adapter: Option<Adapter>,
}

impl QueuedChunk {
    fn new(chunk: &SequenceChunk<'_>) -> Self {
        Self {
            tokens: chunk.tokens.to_vec(),
            first_position: chunk.first_position,
            prompt_len: chunk.prompt_len,
            pages: chunk.pages.to_vec(),
            logits: chunk.logits,
            adapter: chunk.adapter.map(|adapter| Adapter::of_nothing(*adapter.fingerprint())),
        }
    }

    fn chunk(&self) -> SequenceChunk<'_> {
        SequenceChunk {
            tokens: &self.tokens,
            first_position: self.first_position,
            prompt_len: self.prompt_len,
            pages: &self.pages,
            token_types: &[],
            features: &[],
            logits: self.logits,
            adapter: self.adapter.as_ref(),
        }
    }
}

/// Fake language model.
#[derive(Debug)]
pub struct FakeModel {
    groups: Vec<KvGroup>,
    /// Slots of all pages per group, as bytes.
    slots: Vec<Vec<u8>>,
    limits: (usize, usize),
    /// Prompt length up to which keys and values do not depend on it.
    pub trained: usize,
    /// Whether attention is causal.
    pub causal: bool,
    /// Fingerprint.
    pub fingerprint: [u8; 32],
    /// Faults by forward pass number.
    pub faults: BTreeMap<usize, Fault>,
    /// Token after which logits are NaN.
    pub poison: Option<u32>,
    /// Eighths of all positions at which its logits differ from other fakes'.
    pub mistakes: u64,
    /// Vocabulary size that it reports.
    pub vocab: usize,
    /// All batches so far, including failed ones.
    pub batches: RefCell<Vec<Vec<Chunk>>>,
    /// Number of batches that it computes at the same time.
    pub capacity: usize,
    /// Copies and batches that were requested, oldest first. They are computed as late as possible.
    queue: VecDeque<Queued>,
    /// Most batches that were in flight at the same time.
    pub most_in_flight: usize,
    /// Number of finished batches at which the queue loses a pipeline stage.
    pub lost_after: Option<usize>,
    /// Minimum time per token of a batch in flight.
    pub token_time: Duration,
}

/// One step of a hash (SplitMix64).
pub fn mix(state: u64, value: u64) -> u64 {
    let mut bits = state.wrapping_add(value).wrapping_add(0x9E37_79B9_7F4A_7C15);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    bits ^ (bits >> 31)
}

/// Replaces all logits but the first of the largest with negative infinity.
fn keep_largest(row: &mut [f32]) {
    let highest = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let first = row.iter().position(|logit| *logit == highest);
    row.fill(f32::NEG_INFINITY);
    row[first.expect("a row has logits")] = highest;
}

/// Returns the logits after tokens whose hash is `state`; coarse, so that ties happen.
pub fn logits_after(state: u64) -> impl Iterator<Item = f32> {
    (0..VOCAB as u64).map(move |id| (mix(state, id) >> 56) as f32 / 32.0 - 4.0)
}

/// Returns the hidden state of a token, from `state`, the hash of what it attends to, and its position.
pub fn hidden_of(state: u64, position: usize) -> impl Iterator<Item = f32> {
    let state = mix(state, position as u64);
    (0..HIDDEN as u64).map(move |i| (mix(state, 100 + i) >> 56) as f32 / 32.0 - 4.0)
}

/// Returns the embedding of a pooled hidden state, or its scores.
pub fn embedding_of(pooled: &[f32]) -> [f32; EMBEDDING] {
    std::array::from_fn(|i| pooled[i % HIDDEN] * (i + 1) as f32)
}

pub fn scores_of(pooled: &[f32]) -> [f32; LABELS] {
    std::array::from_fn(|i| pooled[i] - pooled[i + 1])
}

/// Returns the hash of an empty sequence. It includes the adapter and, beyond the trained length, the prompt length (as
/// with dynamic RoPE).
pub fn first_state(prompt_len: usize, trained: usize, adapter: Option<&Adapter>) -> u64 {
    let state = mix(7, prompt_len.max(trained) as u64);
    adapter.map_or(state, |adapter| mix(state, adapter.fingerprint()[0].into()))
}

impl FakeModel {
    pub fn new(config: &EngineConfig, windows: &[Option<usize>]) -> Self {
        Self {
            groups: windows
                .iter()
                .map(|&window| KvGroup {
                    layers: 1,
                    kind: if window == STATE { GroupKind::State } else { GroupKind::Pages { window } },
                    page_bytes: PAGE_BYTES as u64,
                })
                .collect(),
            slots: config.pages.iter().map(|&pages| vec![0; pages * PAGE_BYTES]).collect(),
            limits: (config.max_num_batched_tokens, config.max_num_seqs),
            trained: usize::MAX,
            causal: true,
            fingerprint: [7; 32],
            faults: BTreeMap::new(),
            poison: None,
            mistakes: 0,
            vocab: VOCAB,
            batches: RefCell::default(),
            capacity: 1,
            queue: VecDeque::new(),
            most_in_flight: 0,
            lost_after: None,
            token_time: Duration::ZERO,
        }
    }

    fn check_limits(&self, batch: Batch<'_>) {
        let (max_tokens, max_seqs) = self.limits;
        let tokens: usize = batch.sequences.iter().map(|chunk| chunk.tokens.len()).sum();
        // A bidirectional model computes each text whole.
        let alone = !self.causal && batch.sequences.len() == 1;
        assert!(!batch.sequences.is_empty() && (alone || tokens <= max_tokens), "{tokens} tokens in a step");
        let whole = |chunk: &SequenceChunk<'_>| (chunk.first_position, chunk.tokens.len()) == (0, chunk.prompt_len);
        assert!(self.causal || batch.sequences.iter().all(whole), "a partial text in a bidirectional model");
        assert!(batch.sequences.len() <= max_seqs, "{} sequences in a step", batch.sequences.len());
        let mut adapters: Vec<_> =
            batch.sequences.iter().map(|chunk| chunk.adapter.map(|adapter| *adapter.fingerprint())).collect();
        adapters.dedup();
        assert_eq!(
            adapters.iter().collect::<BTreeSet<_>>().len(),
            adapters.len(),
            "rows of an adapter are not adjacent"
        );
        for group in 0..self.groups.len() {
            let mut written = BTreeSet::new();
            let mut read = BTreeSet::new();
            for chunk in batch.sequences {
                if self.groups[group].is_state() {
                    read.extend(chunk.pages[group].first().filter(|_| chunk.first_position > 0));
                    assert!(
                        chunk.pages[group][1..].iter().all(|page| written.insert(*page)),
                        "a state is written twice"
                    );
                    continue;
                }
                let first = chunk.first_position / PAGE_TOKENS;
                let (before, from) = chunk.pages[group].split_at(first.min(chunk.pages[group].len()));
                read.extend(before.iter().copied());
                for &page in from.iter().filter(|&&page| page != PAGE_NONE) {
                    assert!(written.insert(page), "page {page} is written twice");
                }
            }
            assert!(read.is_disjoint(&written), "a sequence writes to a page that another reads");
        }
    }

    /// Returns the byte range of a position's slot.
    fn slot(pages: &[PageId], position: usize) -> Range<usize> {
        let page = pages[position / PAGE_TOKENS];
        assert_ne!(page, PAGE_NONE, "position {position} has no page");
        let start = page as usize * PAGE_BYTES + position % PAGE_TOKENS * SLOT_BYTES;
        start..start + SLOT_BYTES
    }

    fn write_slot(&mut self, group: usize, pages: &[PageId], position: usize, slot: Slot) {
        self.slots[group][Self::slot(pages, position)].copy_from_slice(&slot.to_bytes());
    }

    fn page_range(page: PageId) -> Range<usize> {
        page as usize * PAGE_BYTES..(page as usize + 1) * PAGE_BYTES
    }

    /// Returns the hash before a chunk, after checking everything that its first row attends to.
    fn state_before(&self, chunk: &SequenceChunk<'_>, group: usize) -> u64 {
        if self.groups[group].is_state() && chunk.first_position > 0 {
            let bytes = &self.slots[group][chunk.pages[group][0] as usize * PAGE_BYTES..][..SLOT_BYTES];
            let slot = Slot::from_bytes(bytes).expect("the state was written");
            assert_eq!(slot.position, chunk.first_position as u64, "the state is that of another position");
            return slot.state;
        }
        let window = self.groups[group].window().unwrap_or(usize::MAX);
        let first_seen = (chunk.first_position + 1).saturating_sub(window);
        let mut state = (first_seen == 0).then(|| first_state(chunk.prompt_len, self.trained, chunk.adapter));
        for position in first_seen..chunk.first_position {
            let bytes = &self.slots[group][Self::slot(&chunk.pages[group], position)];
            let slot = Slot::from_bytes(bytes).expect("the page was written");
            assert_eq!(slot.position, position as u64, "the page holds other positions");
            if let Some(before) = state {
                assert_eq!(
                    slot.state,
                    mix(before, read(slot.token, slot.kind)),
                    "position {position} holds another sequence"
                );
            }
            state = Some(slot.state);
        }
        state.expect("windows of the fake are at least two")
    }

    /// Writes a chunk to its pages and returns the hash after each token.
    fn write(&mut self, chunk: &SequenceChunk<'_>, group: usize) -> Vec<u64> {
        let mut state = self.state_before(chunk, group);
        let mut states = Vec::new();
        for (index, &token) in chunk.tokens.iter().enumerate() {
            let position = chunk.first_position + index;
            let kind = chunk.token_types.get(index).map_or(0, |&kind| u8::try_from(kind).unwrap());
            state = mix(state, read(token, kind));
            let slot = Slot { position: position as u64, token, kind, state };
            if !self.groups[group].is_state() {
                self.write_slot(group, &chunk.pages[group], position, slot);
            }
            states.push(state);
        }
        if self.groups[group].is_state() {
            let end = chunk.positions().end;
            for (&page, position) in chunk.pages[group][1..].iter().zip([end, end / PAGE_TOKENS * PAGE_TOKENS]) {
                assert!(position > chunk.first_position, "a snapshot before the chunk");
                let state = states[position - chunk.first_position - 1];
                self.write_state(group, page, Slot { position: position as u64, token: 0, kind: 0, state });
            }
        }
        states
    }

    fn write_state(&mut self, group: usize, page: PageId, slot: Slot) {
        let start = page as usize * PAGE_BYTES;
        self.slots[group][start..start + SLOT_BYTES].copy_from_slice(&slot.to_bytes());
    }

    /// Runs a forward pass that yields `row(state, position, ..)` for each requested row.
    fn compute(
        &mut self,
        batch: Batch<'_>,
        cancel: &Cancel,
        out: &mut Vec<f32>,
        row: impl Fn(u64, usize, &mut Vec<f32>),
    ) -> Result<(), ForwardError> {
        self.check_limits(batch);
        let chunks = batch.sequences.iter().map(|chunk| (chunk.first_position, chunk.tokens.to_vec(), chunk.logits));
        let number = self.batches.get_mut().len();
        self.batches.get_mut().push(chunks.collect());
        out.clear();
        match self.faults.get(&number) {
            _ if cancel.is_cancelled() => return Err(ForwardError::Cancelled),
            None => {}
            Some(Fault::CancelledMidway) => {
                self.write_garbage(batch);
                return Err(ForwardError::Cancelled);
            }
            Some(Fault::Panicked) => return Err(ForwardError::Panicked("index out of bounds".into())),
            Some(Fault::Unwinds) => panic!("a slice was too short"),
        }
        for chunk in batch.sequences {
            let states: Vec<Vec<u64>> = (0..self.groups.len()).map(|group| self.write(chunk, group)).collect();
            assert!(states.windows(2).all(|pair| pair[0] == pair[1]), "groups hold different tokens");
            for index in chunk.logits.of(chunk.tokens.len()) {
                let seen = if self.causal { index } else { chunk.tokens.len() - 1 };
                let start = out.len();
                row(states[0][seen], chunk.first_position + index, out);
                if self.poison == Some(chunk.tokens[index]) {
                    out[start..].fill(f32::NAN);
                } else if chunk.logits == LogitRows::LastLargest {
                    keep_largest(&mut out[start..]);
                }
            }
        }
        Ok(())
    }

    fn write_garbage(&mut self, batch: Batch<'_>) {
        for chunk in batch.sequences {
            for group in 0..self.groups.len() {
                let nonsense = Slot { position: u64::MAX, token: u32::MAX, kind: 0, state: 0 };
                if self.groups[group].is_state() {
                    chunk.pages[group][1..].iter().for_each(|&page| self.write_state(group, page, nonsense));
                    continue;
                }
                for position in chunk.first_position..chunk.first_position + chunk.tokens.len().div_ceil(2) {
                    self.write_slot(group, &chunk.pages[group], position, nonsense);
                }
            }
        }
    }
}

impl LanguageModel for FakeModel {
    fn vocab_size(&self) -> usize {
        self.vocab
    }

    fn kv_groups(&self) -> &[KvGroup] {
        &self.groups
    }

    fn shareable_tokens(&self, prompt_len: usize) -> usize {
        if prompt_len <= self.trained { self.trained } else { 0 }
    }

    fn copy_page(&mut self, group: usize, from: PageId, to: PageId) {
        self.queue.push_back(Queued::Copy { group, from, to });
        self.copy_queued_pages();
    }

    fn page(&self, group: usize, page: PageId) -> &[u8] {
        &self.slots[group][Self::page_range(page)]
    }

    fn set_page(&mut self, group: usize, page: PageId, bytes: &[u8]) {
        self.slots[group][Self::page_range(page)].copy_from_slice(bytes);
    }

    fn fingerprint(&self) -> [u8; 32] {
        self.fingerprint
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities {
            causal: self.causal,
            logits: self.causal,
            hidden_size: HIDDEN,
            embedding_size: EMBEDDING,
            token_types: TOKEN_TYPES,
            feature_width: Some(1),
            embeds_tokens: true,
            merged_rows: 1,
            classifier: Some(ClassifierInfo { pooling: Pooling::Cls, labels: LABELS }),
        }
    }

    fn forward(&mut self, batch: Batch<'_>, cancel: &Cancel, logits: &mut Vec<f32>) -> Result<(), ForwardError> {
        assert!(self.queue.is_empty(), "a forward pass beside batches in flight");
        self.compute_logits(batch, cancel, logits)
    }

    fn hidden_states(&mut self, batch: Batch<'_>, cancel: &Cancel, hidden: &mut Vec<f32>) -> Result<(), ForwardError> {
        self.compute(batch, cancel, hidden, |state, position, row| row.extend(hidden_of(state, position)))
    }

    fn batch_queue(&mut self) -> Option<&mut dyn BatchQueue> {
        if self.capacity > 1 { Some(self) } else { None }
    }

    fn embeddings(&self, pooled: &[f32], _: &Cancel) -> Result<Vec<f32>, ForwardError> {
        Ok(pooled.chunks_exact(HIDDEN).flat_map(embedding_of).collect())
    }

    fn scores(&self, pooled: &[f32], _: &Cancel) -> Result<Vec<f32>, ForwardError> {
        Ok(pooled.chunks_exact(HIDDEN).flat_map(scores_of).collect())
    }
}

impl FakeModel {
    fn compute_logits(&mut self, batch: Batch<'_>, cancel: &Cancel, logits: &mut Vec<f32>) -> Result<(), ForwardError> {
        let mistakes = self.mistakes;
        self.compute(batch, cancel, logits, |state, _, row| {
            let is_mistaken = mix(state, 11) % 8 < mistakes;
            row.extend(logits_after(if is_mistaken { mix(state, 12) } else { state }));
        })
    }

    /// Copies the pages that were requested before the oldest batch.
    fn copy_queued_pages(&mut self) {
        while let Some(&Queued::Copy { group, from, to }) = self.queue.front() {
            self.slots[group].copy_within(Self::page_range(from), Self::page_range(to).start);
            self.queue.pop_front();
        }
    }
}

impl BatchQueue for FakeModel {
    fn capacity(&self) -> usize {
        self.capacity
    }

    fn begin(&mut self, batch: Batch<'_>) -> Result<(), ForwardError> {
        self.check_limits(batch);
        self.queue.push_back(Queued::Batch(batch.sequences.iter().map(QueuedChunk::new).collect()));
        let in_flight = self.queue.iter().filter(|queued| matches!(queued, Queued::Batch(_))).count();
        assert!(in_flight <= self.capacity, "{in_flight} batches in flight");
        self.most_in_flight = self.most_in_flight.max(in_flight);
        Ok(())
    }

    fn finish(&mut self, cancel: &Cancel, logits: &mut Vec<f32>) -> Result<(), ForwardError> {
        if self.lost_after.is_some_and(|batches| self.batches.get_mut().len() >= batches) {
            return Err(ForwardError::StageLost { stage: 1, reason: "stage 1 is lost".into() });
        }
        let Some(Queued::Batch(batch)) = self.queue.pop_front() else { panic!("no batch is in flight") };
        let chunks: Vec<SequenceChunk<'_>> = batch.iter().map(QueuedChunk::chunk).collect();
        let tokens: usize = chunks.iter().map(|chunk| chunk.tokens.len()).sum();
        std::thread::sleep(self.token_time * tokens as u32);
        let done = self.compute_logits(Batch { sequences: &chunks }, cancel, logits);
        if done == Err(ForwardError::Cancelled) {
            self.queue.push_front(Queued::Batch(batch));
        } else {
            self.copy_queued_pages();
        }
        done
    }
}

/// Creates an engine over a fake with the given groups: pages and window of each.
pub fn engine(config: &EngineConfig, windows: &[Option<usize>]) -> Engine<FakeModel> {
    Engine::new(FakeModel::new(config, windows), config.clone()).expect("the configuration is valid")
}

/// Steps until all requests finish; returns all outputs in order.
pub fn run(engine: &mut Engine<FakeModel>) -> Vec<StepOutput> {
    let mut outputs = Vec::new();
    for _ in 0..100_000 {
        if !engine.has_unfinished_requests() {
            return outputs;
        }
        outputs.extend(engine.step(&Cancel::new()).expect("no fault is injected"));
    }
    panic!("the requests do not finish");
}

/// Configuration of a small engine without time or queue limits.
pub fn config() -> EngineConfig {
    EngineConfig {
        pages: vec![32],
        max_model_len: 256,
        max_num_seqs: 8,
        max_num_batched_tokens: 64,
        max_queued_requests: None,
        target_itl: Duration::MAX,
        enable_prefix_caching: true,
        prefix_cache_dir: None,
        speculative: SpeculativeConfig::default(),
    }
}
