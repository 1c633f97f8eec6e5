//! The loop: schedule, forward, sample, hand out.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use ferrule_kernels::Cancel;
use ferrule_model::{Batch, ForwardError, LanguageModel, LogitRows, SequenceChunk};

use crate::pages::{PAGE_NONE, Pages};
use crate::request::{LengthLimits, check_prompt};
use crate::sampling::{Sample, SampleError, Sampler};
use crate::scheduler::{Schedule, Scheduled, Scheduler};
use crate::sequence::Sequence;
use crate::{ConfigError, EngineError, FinishReason, PageStatistics, Request, RequestError, RequestId, StepOutput};

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
}

/// The state of an engine in numbers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EngineStatistics {
    /// Requests that hold pages.
    pub running: usize,
    /// Requests that wait, new ones and those that gave their pages up.
    pub waiting: usize,
    /// Pages of each group of layers.
    pub pages: Vec<PageStatistics>,
    /// How often a request gave its pages up, since the engine began.
    pub preemptions: u64,
    /// Forward passes that came to their end.
    pub steps: u64,
    /// Tokens that they computed.
    pub computed_tokens: u64,
    /// Tokens that were sampled.
    pub sampled_tokens: u64,
}

/// Serves any number of requests from one model.
#[derive(Debug)]
pub struct Engine<M> {
    pub(crate) model: M,
    pub(crate) scheduler: Scheduler,
    pub(crate) config: EngineConfig,
    pub(crate) limits: LengthLimits,
    sampler: Sampler,
    /// Logits of the latest step, `[sampled rows, vocab]`.
    logits: Vec<f32>,
    next_id: u64,
    steps: u64,
    computed_tokens: u64,
    sampled_tokens: u64,
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
        let pages = Pages::new(groups, &config.pages);
        let limits = LengthLimits { max_model_len: config.max_model_len, kv_capacity: pages.capacity_of_one() };
        let max_num_seqs = config.max_num_seqs.min(config.max_num_batched_tokens);
        let scheduler = Scheduler::new(pages, max_num_seqs, config.max_num_batched_tokens);
        Ok(Self {
            model,
            scheduler,
            config,
            limits,
            sampler: Sampler::default(),
            logits: Vec::new(),
            next_id: 0,
            steps: 0,
            computed_tokens: 0,
            sampled_tokens: 0,
            dead: None,
            last_outputs: Vec::new(),
        })
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
    /// [`RequestError`] if it can never be served; nothing is queued then.
    pub fn add_request(&mut self, request: Request) -> Result<RequestId, RequestError> {
        if let Some(reason) = &self.dead {
            return Err(RequestError::Dead { reason: reason.clone() });
        }
        let vocab_size = self.model.vocab_size();
        request.params.validate(vocab_size)?;
        check_prompt(&request.prompt, vocab_size)?;
        self.limits.check(request.prompt.len(), 1)?;
        let id = RequestId(self.next_id);
        self.next_id += 1;
        let tables = self.scheduler.pages.empty_tables();
        self.scheduler.add(Sequence::new(id, request, tables));
        Ok(id)
    }

    /// Ends a request in whatever state it is; its pages are free at once, and no step says anything of it any more.
    /// False if there is no such request, or it has ended before.
    pub fn abort(&mut self, id: RequestId) -> bool {
        self.scheduler.remove(id).is_some()
    }

    /// Whether a step would do something.
    pub fn has_unfinished_requests(&self) -> bool {
        self.scheduler.sequences().next().is_some() || !self.last_outputs.is_empty()
    }

    /// The state in numbers.
    pub fn statistics(&self) -> EngineStatistics {
        let scheduler = &self.scheduler;
        EngineStatistics {
            running: scheduler.running.len(),
            waiting: scheduler.waiting.len(),
            pages: scheduler.pages.statistics(scheduler.sequences().map(|sequence| &sequence.tables)),
            preemptions: scheduler.preemptions,
            steps: self.steps,
            computed_tokens: self.computed_tokens,
            sampled_tokens: self.sampled_tokens,
        }
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
        let plan = self.scheduler.schedule();
        if plan.chunks.is_empty() {
            return Ok(Vec::new());
        }
        self.forward(&plan, cancel)?;
        Ok(self.sample_and_finish(&plan))
    }

    /// Computes what was planned; logits only where a token is sampled.
    fn forward(&mut self, plan: &Schedule, cancel: &Cancel) -> Result<(), ForwardError> {
        for copy in &plan.copies {
            self.model.copy_page(copy.group, copy.from, copy.to);
        }
        let chunk = |&Scheduled { index, count }| {
            let sequence: &Sequence = &self.scheduler.running[index];
            SequenceChunk {
                tokens: &sequence.tokens[sequence.computed..][..count],
                first_position: sequence.computed,
                prompt_len: sequence.prompt_len,
                pages: sequence.tables.tables(),
                logits: if count == sequence.pending() { LogitRows::Last } else { LogitRows::None },
            }
        };
        let sequences: Vec<SequenceChunk<'_>> = plan.chunks.iter().map(chunk).collect();
        self.model.forward(Batch { sequences: &sequences }, cancel, &mut self.logits)
    }

    /// Takes note of what is computed, samples, and parts with the requests that end.
    fn sample_and_finish(&mut self, plan: &Schedule) -> Vec<StepOutput> {
        let vocab_size = self.model.vocab_size();
        let mut rows = self.logits.chunks_exact(vocab_size);
        let mut outputs = Vec::new();
        for &chunk in &plan.chunks {
            let sequence = &mut self.scheduler.running[chunk.index];
            sequence.computed += chunk.count;
            self.computed_tokens += chunk.count as u64;
            if sequence.pending() > 0 {
                continue;
            }
            let logits = rows.next().expect("the model gave fewer rows of logits than were asked for");
            let sampled = self.sampler.sample(logits, &sequence.params, &sequence.history, sequence.tokens.len());
            self.sampled_tokens += u64::from(sampled.is_ok());
            outputs.push(advance(sequence, sampled, self.limits.tokens()));
        }
        self.steps += 1;
        for output in outputs.iter().filter(|output| output.finish.is_some()) {
            self.scheduler.remove(output.request);
        }
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
        let output = |sequence: &Sequence| StepOutput {
            request: sequence.id,
            token_ids: Vec::new(),
            finish: Some(FinishReason::Dead { reason: reason.clone() }),
            logprobs: Vec::new(),
            trace: Vec::new(),
            timing: sequence.timing,
        };
        self.last_outputs = self.scheduler.sequences().map(output).collect();
        let pages = Pages::new(self.model.kv_groups(), &self.config.pages);
        self.scheduler = Scheduler::new(pages, self.config.max_num_seqs, self.config.max_num_batched_tokens);
        self.dead = Some(reason);
    }
}

/// Gives a sequence its token, and says what its request gets.
fn advance(sequence: &mut Sequence, sampled: Result<Sample, SampleError>, most_tokens: usize) -> StepOutput {
    let mut output = StepOutput {
        request: sequence.id,
        token_ids: Vec::new(),
        finish: None,
        logprobs: Vec::new(),
        trace: Vec::new(),
        timing: sequence.timing,
    };
    match sampled {
        Err(error) => output.finish = Some(FinishReason::Sampling(error)),
        Ok(Sample { token, logprobs, trace }) => {
            sequence.push(token);
            output.token_ids.push(token);
            output.logprobs.extend(logprobs);
            output.trace.extend(trace);
            output.timing = sequence.timing;
            if sequence.params.is_stop(token) {
                output.finish = Some(FinishReason::Stop { token });
            } else if sequence.output_len() >= sequence.params.max_tokens || sequence.tokens.len() >= most_tokens {
                output.finish = Some(FinishReason::Length);
            }
        }
    }
    output
}

/// What a panic said.
pub(crate) fn panic_message(panic: &(dyn Any + Send)) -> String {
    match (panic.downcast_ref::<&str>(), panic.downcast_ref::<String>()) {
        (Some(message), _) => (*message).to_owned(),
        (_, Some(message)) => message.clone(),
        _ => "a panic without a message".to_owned(),
    }
}
