//! Processors on which the calling thread may run.

/// Returns the processors in the affinity mask of the calling thread, or none if unknown.
pub fn processors() -> Vec<usize> {
    // SAFETY: an array of bits, for which all zero bytes are valid; the call gets its size and fills it.
    let (set, found) = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        let found = libc::sched_getaffinity(0, size_of::<libc::cpu_set_t>(), &raw mut set) == 0;
        (set, found)
    };
    // SAFETY: the indices are below the size of the set.
    let allowed = |processor: &usize| found && unsafe { libc::CPU_ISSET(*processor, &set) };
    (0..libc::CPU_SETSIZE as usize).filter(allowed).collect()
}

/// Restricts the calling thread to these processors. Where the system refuses, as for processors that are offline, the
/// thread runs where it could before.
pub fn restrict(processors: &[usize]) {
    // SAFETY: an array of bits, for which all zero bytes are valid; the indices are below its size.
    unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        for processor in processors.iter().filter(|processor| **processor < libc::CPU_SETSIZE as usize) {
            libc::CPU_SET(*processor, &mut set);
        }
        libc::sched_setaffinity(0, size_of::<libc::cpu_set_t>(), &raw const set);
    }
}
