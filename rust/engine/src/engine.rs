//! The loop: schedule, forward, sample, hand out.

use std::any::Any;
use std::borrow::Cow;
use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::slice::ChunksExact;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ferrule_kernels::Cancel;
use ferrule_kernels::kv::PAGE_TOKENS;
use ferrule_model::{Batch, ForwardError, LanguageModel, LogitRows, SequenceChunk};

use crate::beams::{self, Searches};
use crate::draft::{DraftLimits, DraftModel, Speculator};
use crate::pace::Pace;
use crate::pages::{DiskCache, Namespace, PAGE_NONE, Pages};
use crate::request::{LengthLimits, check_prompt};
use crate::sampling::{Sample, SampleError, Sampler};
use crate::scheduler::{Schedule, Scheduled, Scheduler, StepLimits};
use crate::sequence::Sequence;
use crate::structured::{self, Constraint, Next};
use crate::{
    ConfigError, EngineError, FinishReason, Metrics, PageStatistics, Request, RequestError, RequestId,
    SpeculativeConfig, StepOutput, TokenLogprobs,
};

/// What an engine may use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineConfig {
    /// Pages of the model's store, for each group of layers: the engine gives out numbers below these.
    pub pages: Vec<usize>,
    /// Tokens of prompt and continuation together, at the most.
    pub max_model_len: usize,
    /// Sequences that are computed side by side, at the most; never more than `max_num_batched_tokens`.
    pub max_num_seqs: usize,
    /// Tokens that one step computes, at the most: the chunk into which long prompts are cut.
    pub max_num_batched_tokens: usize,
    /// Requests that wait for a place, at the most.
    pub max_queued_requests: Option<usize>,
    /// How long a step should take at the most that computes prompts beside sequences that decode and are streamed.
    pub target_itl: Duration,
    /// Whether pages are kept for requests that begin with the same tokens.
    pub enable_prefix_caching: bool,
    /// Where they are kept beyond the life of the engine; only with prefix caching.
    pub prefix_cache_dir: Option<PrefixCacheDir>,
    /// What is guessed of the tokens to come.
    pub speculative: SpeculativeConfig,
}

/// A directory for pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrefixCacheDir {
    /// The directory.
    pub path: PathBuf,
    /// Bytes that it may hold.
    pub limit: u64,
    /// Bytes that a step reads from there at the most, beyond one page: those who decode wait for it.
    pub step_bytes: usize,
}

/// Logits of a step for the log-probabilities of prompts, at the most: every row is wanted there, and each is as long as
/// the vocabulary.
const MAX_LOGITS: usize = 1 << 24;

/// Serves any number of requests from one model.
#[derive(Debug)]
pub struct Engine<M> {
    pub(crate) model: M,
    pub(crate) scheduler: Scheduler,
    pub(crate) config: EngineConfig,
    pub(crate) limits: LengthLimits,
    sampler: Sampler,
    /// Logits of the latest step, `[sampled rows, vocab]`.
    pub(crate) logits: Vec<f32>,
    next_id: u64,
    pace: Pace,
    speculator: Speculator<M>,
    searches: Searches,
    pub(crate) metrics: Metrics,
    /// A copy of the metrics as of the latest call, for whoever does not want to wait for a step.
    published: Arc<Mutex<Metrics>>,
    /// Why it serves no more.
    dead: Option<String>,
    /// What the next step tells the requests that died with the engine.
    last_outputs: Vec<StepOutput>,
}

impl<M: LanguageModel> Engine<M> {
    /// An engine without requests.
    ///
    /// # Errors
    /// [`ConfigError`] if the configuration leaves no room for anything, or does not fit the model.
    pub fn new(model: M, config: EngineConfig) -> Result<Self, ConfigError> {
        Self::with_draft_model(model, None, config)
    }

    /// As [`Engine::new`], with a model that guesses for it.
    ///
    /// # Errors
    /// [`ConfigError`], also if the draft model does not fit the model.
    pub fn with_draft_model(
        model: M,
        draft: Option<DraftModel<M>>,
        mut config: EngineConfig,
    ) -> Result<Self, ConfigError> {
        for (field, value) in [
            ("max_model_len", config.max_model_len),
            ("max_num_seqs", config.max_num_seqs),
            ("max_num_batched_tokens", config.max_num_batched_tokens),
        ] {
            if value == 0 {
                return Err(ConfigError::Zero { field });
            }
        }
        let groups = model.kv_groups();
        if groups.len() != config.pages.len() {
            return Err(ConfigError::PoolCount { expected: groups.len(), given: config.pages.len() });
        }
        let limit = PAGE_NONE as usize;
        if let Some(&pages) = config.pages.iter().find(|&&pages| pages > limit) {
            return Err(ConfigError::PoolTooLarge { pages, limit });
        }
        if !model.abilities().causal {
            if config.prefix_cache_dir.is_some() {
                return Err(ConfigError::NoPrefixes);
            }
            config.enable_prefix_caching = false;
        }
        let speculator = Speculator::new(&config, draft, &model)?;
        let mut scheduler = new_scheduler(&model, &config);
        if let Some(PrefixCacheDir { path, limit, .. }) =
            config.prefix_cache_dir.as_ref().filter(|_| config.enable_prefix_caching)
        {
            scheduler.pages.attach(DiskCache::open(path, *limit)?, &model);
        }
        let kv_capacity = scheduler.pages.capacity_of_one();
        let mut engine = Self {
            model,
            scheduler,
            limits: LengthLimits { max_model_len: config.max_model_len, kv_capacity },
            sampler: Sampler::default(),
            logits: Vec::new(),
            next_id: 0,
            pace: Pace::new(config.target_itl),
            speculator,
            searches: Searches::default(),
            metrics: Metrics::default(),
            published: Arc::default(),
            dead: None,
            last_outputs: Vec::new(),
            config,
        };
        engine.publish();
        Ok(engine)
    }

    /// The model.
    pub fn model(&self) -> &M {
        &self.model
    }

    /// Tokens of prompt and continuation that a request can have: what the context and the KV pages hold, whichever is
    /// less.
    pub fn max_model_len(&self) -> usize {
        self.limits.tokens()
    }

    /// Why the engine serves no more, if it does not.
    pub fn dead(&self) -> Option<&str> {
        self.dead.as_deref()
    }

    /// Queues a request.
    ///
    /// # Errors
    /// [`RequestError`] if it can never be served, or too many wait; nothing is queued then.
    pub fn add_request(&mut self, request: Request) -> Result<RequestId, RequestError> {
        self.add(request, None)
    }

    /// Queues a request with the prompt of an earlier one. It waits until that prompt is computed, and shares its
    /// pages: so a prompt with many continuations is computed once. If the other one ends before, or its prompt turns
    /// out to be different, this is a request like any other.
    ///
    /// # Errors
    /// As [`Engine::add_request`].
    pub fn fork_request(&mut self, request: Request, of: RequestId) -> Result<RequestId, RequestError> {
        self.add(request, Some(of))
    }

    fn add(&mut self, mut request: Request, twin: Option<RequestId>) -> Result<RequestId, RequestError> {
        let checked = self.check_request(&request);
        self.metrics.requests_refused += u64::from(checked.is_err());
        if checked.is_ok() {
            self.next_id += 1;
            let same = |other: &&Sequence| {
                Some(other.id) == twin
                    && other.tokens[..other.prompt_len] == request.prompt
                    && other.params.cache_salt == request.params.cache_salt
                    && other.adapter == request.adapter
            };
            let twin = self.scheduler.sequences().find(same).map(|twin| twin.id);
            let shareable = self.model.shareable_tokens(request.prompt.len());
            let namespace = Namespace::new(request.params.cache_salt.clone(), request.adapter.as_deref());
            let tables = self.scheduler.pages.tables(namespace, shareable);
            let id = RequestId(self.next_id - 1);
            let prediction = std::mem::take(&mut request.params.prediction);
            let drafts = self.speculator.sources(&request, prediction);
            let most_tokens = request.params.max_tokens.min(self.limits.tokens() - request.prompt.len());
            self.searches.begin(id, &request.params, most_tokens);
            self.scheduler.add(Sequence::new(id, request, twin, tables, drafts));
        }
        self.publish();
        checked.map(|()| RequestId(self.next_id - 1))
    }

    fn check_request(&self, request: &Request) -> Result<(), RequestError> {
        if let Some(reason) = &self.dead {
            return Err(RequestError::Dead { reason: reason.clone() });
        }
        self.check_generates()?;
        let vocab_size = self.model.vocab_size();
        request.params.validate(vocab_size)?;
        check_prompt(&request.prompt, vocab_size)?;
        self.limits.check(request.prompt.len(), 1)?;
        if let Some(search) = &request.params.beam_search {
            self.scheduler.check_beams(search.beam_width, request.prompt.len())?;
        }
        let (_, waiting) = self.scheduler.requests();
        match self.config.max_queued_requests {
            // Those for whom there is a place wait for no more than the next step.
            Some(limit) if waiting >= limit + self.scheduler.free_places() => {
                Err(RequestError::QueueFull { waiting, limit })
            }
            _ => Ok(()),
        }
    }

    pub(crate) fn check_generates(&self) -> Result<(), RequestError> {
        if self.model.abilities().logits { Ok(()) } else { Err(RequestError::NoLogits) }
    }

    /// Ends a request in whatever state it is; its pages are free at once, and no step says anything of it any more.
    /// False if there is no such request, or it has ended before.
    pub fn abort(&mut self, id: RequestId) -> bool {
        let aborted = self.scheduler.remove(id);
        self.searches.end(id);
        self.speculator.forget(|gone| gone == id);
        self.metrics.requests_finished.abort += u64::from(aborted);
        self.publish();
        aborted
    }

    /// Whether a step would do something.
    pub fn has_unfinished_requests(&self) -> bool {
        self.scheduler.sequences().next().is_some() || !self.last_outputs.is_empty()
    }

    /// The engine in numbers.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// The same as of the latest call that has ended: to be read beside a step that runs.
    pub fn published_metrics(&self) -> Arc<Mutex<Metrics>> {
        Arc::clone(&self.published)
    }

    /// How the pages of each group of layers are used.
    pub fn page_statistics(&self) -> Vec<PageStatistics> {
        self.scheduler.pages.statistics()
    }

    /// Checks that every page is accounted for. Takes time in proportion to the pages: for tests.
    ///
    /// # Errors
    /// What is wrong.
    pub fn audit_pages(&self) -> Result<(), String> {
        self.scheduler.pages.audit(self.scheduler.sequences().map(|sequence| &sequence.tables))?;
        self.speculator.audit(|id| self.scheduler.sequences().any(|sequence| sequence.id == id))
    }

    pub(crate) fn publish(&mut self) {
        let Self { metrics, scheduler, published, .. } = self;
        (metrics.running, metrics.waiting) = scheduler.requests();
        metrics.preemptions = scheduler.preemptions;
        metrics.prefix_queries_tokens = scheduler.prefix_queries;
        metrics.prefix_hits_tokens = scheduler.prefix_hits;
        metrics.note_pages(&scheduler.pages.statistics());
        if let Some(disk) = scheduler.pages.disk_statistics() {
            metrics.disk_hits_tokens = disk.hits * PAGE_TOKENS as u64;
            metrics.disk_stored_bytes = disk.bytes;
        }
        published.lock().unwrap_or_else(PoisonError::into_inner).clone_from(metrics);
    }

    /// One forward pass over what the scheduler picks, and a token for each sequence that is computed to its end.
    /// Gives one output for each request that got a token or ended.
    ///
    /// A defect of ferrule in here ends the engine: this call then gives every request its error, all later ones are
    /// refused.
    ///
    /// # Errors
    /// [`EngineError::Cancelled`]: tokens are as they were before, and the next step does the same work again.
    /// [`EngineError::Dead`]: an earlier call ended the engine.
    pub fn step(&mut self, cancel: &Cancel) -> Result<Vec<StepOutput>, EngineError> {
        if self.last_outputs.is_empty() {
            self.check_alive()?;
            match catch_unwind(AssertUnwindSafe(|| self.schedule_forward_sample(cancel))) {
                Ok(Ok(outputs)) => return Ok(outputs),
                Ok(Err(ForwardError::Cancelled)) => return Err(EngineError::Cancelled),
                Ok(Err(ForwardError::Panicked(reason))) => self.die(reason),
                Err(panic) => self.die(panic_message(panic.as_ref())),
            }
        }
        Ok(std::mem::take(&mut self.last_outputs))
    }

    fn schedule_forward_sample(&mut self, cancel: &Cancel) -> Result<Vec<StepOutput>, ForwardError> {
        let begin = Instant::now();
        let watched = self.scheduler.running.iter().any(|one| one.params.streams && one.pending() == 1);
        let prompt_tokens = self.pace.budget(watched);
        let limits = DraftLimits { most_tokens: self.limits.tokens(), prompt_tokens };
        self.speculator.propose(&mut self.scheduler.running, limits, &mut self.sampler, cancel)?;
        let begin_forward = Instant::now();
        let plan = self.scheduler.schedule(prompt_tokens);
        for page_move in &plan.moves {
            page_move.apply(&mut self.model);
        }
        if plan.chunks.is_empty() {
            return Ok(Vec::new());
        }
        self.forward_beside_masks(&plan, cancel)?;
        let outputs = self.sample_and_finish(&plan);
        let time = begin.elapsed();
        let decoded = plan.chunks.iter().filter(|chunk| chunk.count == 1).count();
        let prompts = plan.chunks.iter().map(|chunk| chunk.count).filter(|&count| count > 1).sum();
        self.pace.note(time.as_secs_f64(), decoded, prompts);
        if prompts == 0 {
            self.speculator.note(plan.rows(), begin_forward.elapsed().as_secs_f64());
        }
        self.metrics.steps += 1;
        self.metrics.step_seconds.note(time);
        self.publish();
        Ok(outputs)
    }

    /// Computes what was planned; logits only where a token is sampled or told of.
    fn forward(&mut self, plan: &Schedule, cancel: &Cancel) -> Result<(), ForwardError> {
        let running: &[Sequence] = &self.scheduler.running;
        let tokens = |&Scheduled { index, count, drafts }| {
            let sequence = &running[index];
            let pending = &sequence.tokens[sequence.computed..][..count];
            if drafts == 0 { Cow::from(pending) } else { Cow::from([pending, sequence.drafts.tokens()].concat()) }
        };
        let tokens: Vec<Cow<'_, [u32]>> = plan.chunks.iter().map(tokens).collect();
        let chunks = plan.chunks.iter().zip(&tokens).map(|(scheduled, tokens)| {
            let sequence = &running[scheduled.index];
            SequenceChunk {
                tokens,
                first_position: sequence.computed,
                prompt_len: sequence.prompt_len,
                pages: sequence.tables.tables(),
                token_types: &[],
                logits: wanted_logits(sequence, scheduled),
                adapter: sequence.adapter.as_deref(),
            }
        });
        let sequences: Vec<SequenceChunk<'_>> = chunks.collect();
        self.model.forward(Batch { sequences: &sequences }, cancel, &mut self.logits)
    }

    /// As [`Engine::forward`]; masks that take long are made meanwhile, the others when their token is sampled.
    fn forward_beside_masks(&mut self, plan: &Schedule, cancel: &Cancel) -> Result<(), ForwardError> {
        let mut constraints = Vec::new();
        for &Scheduled { index, count, .. } in &plan.chunks {
            let sequence = &mut self.scheduler.running[index];
            if count == sequence.pending() {
                let slow = sequence.constraint.take_if(|constraint| constraint.is_slow());
                constraints.extend(slow.map(|constraint| (index, constraint)));
            }
        }
        let forward =
            structured::beside(constraints.iter_mut().map(|(_, constraint)| constraint), || self.forward(plan, cancel));
        for (index, constraint) in constraints {
            self.scheduler.running[index].constraint = Some(constraint);
        }
        forward
    }

    /// Takes note of what is computed, samples, and parts with the requests that end.
    fn sample_and_finish(&mut self, plan: &Schedule) -> Vec<StepOutput> {
        let vocab_size = self.model.vocab_size();
        let logits = std::mem::take(&mut self.logits);
        let mut rest = logits.as_slice();
        let mut outputs = Vec::new();
        let mut searched = BTreeSet::new();
        for &chunk in &plan.chunks {
            let sequence = &mut self.scheduler.running[chunk.index];
            let count = wanted_logits(sequence, &chunk).of(chunk.rows()).len();
            let (rows, after) = rest.split_at_checked(count * vocab_size).expect("a row of logits for each asked for");
            rest = after;
            sequence.computed += chunk.count;
            self.metrics.computed_tokens += chunk.rows() as u64;
            if sequence.timing.first_token.is_none() && sequence.computed >= sequence.prompt_len {
                self.metrics.note_prompt(sequence.prompt_len, &sequence.timing);
            }
            let rows = rows.chunks_exact(vocab_size);
            let mut output = None;
            let mut error = None;
            if sequence.beam.is_some() {
                error = rows.last().and_then(|row| beams::look_ahead(sequence, row, &mut self.sampler));
                searched.insert(sequence.id);
            } else if rows.len() > 0 {
                let got = advance(sequence, rows, &mut self.sampler, self.limits.tokens(), &mut self.metrics);
                if let Some(FinishReason::Sampling(found)) = &got.finish {
                    error = Some(found.clone());
                }
                output = Some(got);
            }
            let pages = &mut self.scheduler.pages;
            if chunk.drafts > 0 {
                pages.release_beyond(&mut sequence.tables, sequence.computed);
            }
            if let Some(SampleError::NotFinite { .. }) = error {
                // Whatever made these logits may be in the pages.
                pages.disown(&mut sequence.tables);
            } else {
                for fresh in pages.keep(&mut sequence.tables, &sequence.tokens, sequence.computed) {
                    pages.save(&mut sequence.tables, &fresh, &self.model);
                }
            }
            outputs.extend(output);
        }
        outputs.extend(self.searches.advance(&searched, &mut self.scheduler, &mut self.metrics));
        for output in &outputs {
            let Some(reason) = &output.finish else { continue };
            self.metrics.requests_finished.note(reason);
            self.scheduler.remove(output.request);
            self.speculator.forget(|gone| gone == output.request);
        }
        self.logits = logits;
        outputs
    }

    pub(crate) fn check_alive(&self) -> Result<(), EngineError> {
        match &self.dead {
            Some(reason) => Err(EngineError::Dead { reason: reason.clone() }),
            None => Ok(()),
        }
    }

    /// Ends the engine. What its parts hold is not to be trusted any more, so that nothing of it is used again.
    pub(crate) fn die(&mut self, reason: String) {
        let finish = FinishReason::Dead { reason: reason.clone() };
        let output = |sequence: &Sequence| StepOutput { finish: Some(finish.clone()), ..StepOutput::empty(sequence) };
        self.last_outputs = self.scheduler.sequences().filter(|one| one.leads()).map(output).collect();
        self.searches = Searches::default();
        self.metrics.requests_finished.error += self.last_outputs.len() as u64;
        let scheduler = new_scheduler(&self.model, &self.config);
        let old = std::mem::replace(&mut self.scheduler, scheduler);
        self.speculator.forget(|_| true);
        // A disk takes its time to close, and those who wait for this engine should hear of it first.
        self.scheduler.pages.take_tier(old.pages);
        self.dead = Some(reason);
        self.publish();
    }
}

fn new_scheduler<M: LanguageModel>(model: &M, config: &EngineConfig) -> Scheduler {
    let pages = Pages::new(model.kv_groups(), &config.pages, config.enable_prefix_caching);
    let limits = StepLimits {
        max_num_seqs: config.max_num_seqs.min(config.max_num_batched_tokens),
        max_num_batched_tokens: config.max_num_batched_tokens,
        logit_rows: MAX_LOGITS / model.vocab_size().max(1),
        fetch_bytes: config.prefix_cache_dir.as_ref().map_or(0, |directory| directory.step_bytes),
    };
    Scheduler::new(pages, limits)
}

/// The logits that are wanted of the part of a sequence that is computed: of a decode step those of its drafts too.
fn wanted_logits(sequence: &Sequence, &Scheduled { count, drafts, .. }: &Scheduled) -> LogitRows {
    if drafts > 0 || sequence.chunk_tells(count) {
        LogitRows::All
    } else if count == sequence.pending() {
        LogitRows::Last
    } else {
        LogitRows::None
    }
}

/// Tells of a sequence's prompt and gives it its tokens, from the logits of its latest rows: one, and one more for each
/// draft that it makes come true. What its request gets.
fn advance(
    sequence: &mut Sequence,
    rows: ChunksExact<'_, f32>,
    sampler: &mut Sampler,
    most_tokens: usize,
    metrics: &mut Metrics,
) -> StepOutput {
    let mut output = StepOutput::empty(sequence);
    let drafted = sequence.drafts.tokens().len();
    let untold = rows.len() - 1 - drafted;
    if let Err(error) = tell_prompt(sequence, rows.clone(), sampler, &mut output.prompt_logprobs) {
        output.finish = Some(FinishReason::Sampling(error));
        return output;
    }
    if sequence.pending() > 0 {
        return output;
    }
    let mut accepted = 0;
    for row in rows.skip(untold) {
        match sample(sequence, row, sampler) {
            Err(reason) => output.finish = Some(reason),
            Ok(Sample { token, logprobs, entropy, trace }) => {
                let since_last = sequence.push(token);
                output.token_ids.push(token);
                output.logprobs.extend(logprobs);
                output.entropies.extend(entropy);
                output.trace.extend(trace);
                if sequence.params.is_stop(token) {
                    output.finish = Some(FinishReason::Stop { token });
                } else if let Some(reason) =
                    sequence.constraint.as_mut().and_then(|constraint| constraint.end_with(token))
                {
                    output.finish = Some(reason);
                } else if sequence.output_len() >= sequence.params.max_tokens || sequence.tokens.len() >= most_tokens {
                    output.finish = Some(FinishReason::Length);
                }
                metrics.note_token(since_last, &sequence.timing, output.finish.is_some());
                // Its keys and values are there if it was the draft in this place.
                let came_true = sequence.drafts.tokens().get(accepted) == Some(&token);
                accepted += usize::from(came_true);
                sequence.computed += usize::from(came_true);
                if !came_true {
                    break;
                }
            }
        }
        if output.finish.is_some() {
            break;
        }
    }
    sequence.note_drafts(accepted);
    metrics.drafted_tokens += drafted as u64;
    metrics.accepted_tokens += accepted as u64;
    output.timing = sequence.timing;
    output
}

/// The next token of a sequence, or why there is none.
fn sample(sequence: &mut Sequence, row: &[f32], sampler: &mut Sampler) -> Result<Sample, FinishReason> {
    let Sequence { constraint, params, history, tokens, .. } = sequence;
    let mask = match constraint.as_mut().map(Constraint::next).transpose().map_err(FinishReason::Constraint)? {
        Some(Next::End) => return Err(FinishReason::Complete),
        Some(Next::Tokens(mask)) => Some(mask),
        None => None,
    };
    sampler.sample(row, params, history, mask, tokens.len()).map_err(FinishReason::Sampling)
}

/// Adds the log-probabilities of the prompt's tokens that the rows of the latest chunk tell.
fn tell_prompt(
    sequence: &mut Sequence,
    rows: ChunksExact<'_, f32>,
    sampler: &mut Sampler,
    told: &mut Vec<TokenLogprobs>,
) -> Result<(), SampleError> {
    if !sequence.tells_prompt() {
        return Ok(());
    }
    let count = sequence.params.prompt_logprobs.unwrap_or(0);
    // The row of a position tells of the token after it.
    let first = sequence.computed + 1 - rows.len();
    for (row, position) in rows.zip(first..) {
        if position == sequence.next_prompt_logprob && sequence.tells_prompt() {
            told.push(sampler.logprobs(row, sequence.tokens[position], count, position)?);
            sequence.next_prompt_logprob += 1;
        }
    }
    Ok(())
}

/// What a panic said.
pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> String {
    match (panic.downcast_ref::<&str>(), panic.downcast_ref::<String>()) {
        (Some(message), _) => (*message).to_owned(),
        (_, Some(message)) => message.clone(),
        _ => "a panic without a message".to_owned(),
    }
}
