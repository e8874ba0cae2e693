// Command manifests checks the Kubernetes manifests of a folder: each object
// decodes strictly into the API's own type, what it refers to is there, the
// shunt configuration inside is valid, and the grace period covers the drain.
//
// It is a module of its own, since nothing else needs the API's types.
package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/json"
	"sigs.k8s.io/yaml"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) != 1 {
		return errors.New("usage: manifests FOLDER")
	}
	files, err := filepath.Glob(filepath.Join(args[0], "kubernetes-*.yaml"))
	if err != nil {
		return err
	}
	if len(files) == 0 {
		return fmt.Errorf("no manifest in %s", args[0])
	}
	var errs []error
	for _, file := range files {
		if err := check(file); err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", filepath.Base(file), err))
		}
	}
	return errors.Join(errs...)
}

func check(file string) error {
	b, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	drain := time.Duration(0)
	maps := map[string]bool{}
	var pods []corev1.PodSpec
	for _, text := range regexp.MustCompile(`(?m)^---$`).Split(string(b), -1) {
		var m metav1.TypeMeta
		if err := yaml.Unmarshal([]byte(text), &m); err != nil {
			return err
		}
		switch kind := m.APIVersion + " " + m.Kind; kind {
		case "v1 Namespace":
			err = decode(text, &corev1.Namespace{})
		case "v1 ConfigMap":
			var c corev1.ConfigMap
			err = decode(text, &c)
			maps[c.Name] = true
			if err == nil {
				drain, err = checkConfig(c.Data["config.toml"])
			}
		case "apps/v1 Deployment":
			var d appsv1.Deployment
			err = decode(text, &d)
			pods = append(pods, d.Spec.Template.Spec)
			if err == nil {
				err = selects(d.Spec.Selector, d.Spec.Template.Labels)
			}
		case "apps/v1 DaemonSet":
			var d appsv1.DaemonSet
			err = decode(text, &d)
			pods = append(pods, d.Spec.Template.Spec)
			if err == nil {
				err = selects(d.Spec.Selector, d.Spec.Template.Labels)
			}
		default:
			err = fmt.Errorf("unexpected object %q", kind)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", m.Kind, err)
		}
	}
	if len(pods) == 0 {
		return errors.New("no pods")
	}
	for _, p := range pods {
		if err := checkPod(p, maps, drain); err != nil {
			return err
		}
	}
	return nil
}

// decode is as strict as the API server: with field validation, by exact case.
func decode(text string, v any) error {
	b, err := yaml.YAMLToJSONStrict([]byte(text))
	if err != nil {
		return err
	}
	strict, err := json.UnmarshalStrict(b, v)
	return errors.Join(append(strict, err)...)
}

// checkConfig lets shunt check its configuration, and returns the drain timeout.
func checkConfig(text string) (time.Duration, error) {
	cmd := exec.Command("go", "run", "./cmd/shunt", "check", "--config", "-")
	cmd.Dir = filepath.Join("..", "..")
	cmd.Stdin = strings.NewReader(text)
	if out, err := cmd.CombinedOutput(); err != nil {
		return 0, fmt.Errorf("shunt check: %w\n%s", err, out)
	}
	m := regexp.MustCompile(`(?m)^drain_timeout = "(.*)"$`).FindStringSubmatch(text)
	if m == nil {
		return 0, errors.New("config.toml has no drain_timeout")
	}
	return time.ParseDuration(m[1])
}

func selects(s *metav1.LabelSelector, labels map[string]string) error {
	sel, err := metav1.LabelSelectorAsMap(s)
	for k, v := range sel {
		if labels[k] != v {
			return fmt.Errorf("the selector %s=%s doesn't match the pods", k, v)
		}
	}
	return err
}

func checkPod(p corev1.PodSpec, maps map[string]bool, drain time.Duration) error {
	volumes := map[string]bool{}
	for _, v := range p.Volumes {
		volumes[v.Name] = true
		if c := v.ConfigMap; c != nil && !maps[c.Name] {
			return fmt.Errorf("volume %s: no ConfigMap %s", v.Name, c.Name)
		}
	}
	found := false
	for _, c := range slices.Concat(p.InitContainers, p.Containers) {
		if c.Name != "shunt" {
			continue
		}
		found = true
		for _, m := range c.VolumeMounts {
			if !volumes[m.Name] {
				return fmt.Errorf("no volume %s", m.Name)
			}
		}
		for _, probe := range []*corev1.Probe{c.StartupProbe, c.ReadinessProbe, c.LivenessProbe} {
			if probe == nil || probe.HTTPGet == nil {
				return errors.New("a probe is missing")
			}
			port := probe.HTTPGet.Port
			if port.Type == intstr.String && !slices.ContainsFunc(c.Ports, func(x corev1.ContainerPort) bool { return x.Name == port.StrVal }) {
				return fmt.Errorf("no port %s", port.StrVal)
			}
		}
		if c.Lifecycle != nil && c.Lifecycle.PreStop != nil {
			drain += time.Duration(c.Lifecycle.PreStop.Sleep.Seconds) * time.Second
		}
	}
	if !found {
		return errors.New("no container shunt")
	}
	if grace := p.TerminationGracePeriodSeconds; grace == nil || time.Duration(*grace)*time.Second <= drain {
		return fmt.Errorf("terminationGracePeriodSeconds doesn't cover %v", drain)
	}
	return nil
}
